# SPDX-License-Identifier: Apache-2.0
"""What the layers of a batch share: lengths and page tables, made on the device from SGLang's own arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

from .._plans import Plans
from .._step import Step


@dataclass
class Metadata:
    step: Step  # of layers whose keys lie in the pool of all tokens
    window_step: Step | None = None  # of layers in SWAKVPool's other pool, whose slots have other numbers
    window_slots: torch.Tensor | None = None  # int64 [tokens and padding]: where those layers' new keys go
    new_tokens: int | torch.Tensor = 0  # a request's tokens that seq_lens leaves out: those that are verified, or drafted so far
    owns_all_rows: bool = True  # False: rows behind those of the last request may belong to none, which only the device knows
    tree: torch.Tensor | None = None  # bool [tokens, new_tokens]: which of a request's new tokens each one sees
    draft: Draft | None = None  # the step of a draft model that this is of
    shares_table: bool = False  # with the first of the draft model's steps, which fills it


@dataclass(frozen=True)
class Draft:
    """A step of a draft model's decode. A request has topk branches, each a chain behind what is in the cache; in SGLang's table of
    tokens there are num_steps places for each of them, branch by branch."""

    step: int
    topk: int
    num_steps: int

    @property
    def new_tokens(self) -> int:
        """Of a request, to the newest of its last branch; places between that later steps write are among them."""
        return (self.topk - 1) * self.num_steps + self.step + 1

    def tree(self) -> torch.Tensor:
        """bool [topk, new_tokens]: a branch sees its own tokens."""
        place = torch.arange(self.new_tokens)
        own = place // self.num_steps == torch.arange(self.topk).unsqueeze(1)
        return own & (place % self.num_steps <= self.step)


class Tables:
    """Makes metadata. SGLang has a slot of each token in req_to_token [requests, tokens]; attention wants pages of requests."""

    def __init__(self, req_to_token: torch.Tensor, page_size: int, full_to_swa: torch.Tensor | None, max_seq_len: int,
                 plans: Plans) -> None:
        """full_to_swa: a slot of SWAKVPool's other pool for each slot, int64. max_seq_len: of any request."""
        self._first_slots = req_to_token[:, ::page_size]  # of each page
        self._page_size = page_size
        self._full_to_swa = full_to_swa
        self.max_seq_len = max_seq_len
        self._plans = plans
        self._powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=req_to_token.device)

    def empty(self, num_reqs: int, num_tokens: int, max_query_len: int, query_start_loc: torch.Tensor | None,
              buffers: Metadata | None = None, new_tokens: int | torch.Tensor = 0, tree: torch.Tensor | None = None) -> Metadata:
        """Metadata that `fill` completes, in the first rows of buffers if there are any."""

        def step(like: Step | None) -> Step:
            lengths = self._new(num_reqs) if like is None else like.seq_lens
            table = self._new(num_reqs, self._first_slots.shape[1]) if like is None else like.block_table
            return Step.of(self._plans, num_tokens, num_reqs, max_query_len, self.max_seq_len, query_start_loc, lengths, table)

        made = Metadata(step(None if buffers is None else buffers.step), new_tokens=new_tokens, tree=tree)
        if tree is not None:
            made.step.masks = {"mask_bits": self._new(len(tree), -(-tree.shape[1] // 8), dtype=torch.uint8), "mask_start": self._new(num_reqs)}
        if self._full_to_swa is not None:
            made.window_step = step(None if buffers is None else buffers.window_step)
            made.window_step.seq_lens, made.window_step.masks = made.step.seq_lens, made.step.masks
        return made

    def drafted(self, num_reqs: int, draft: Draft, buffers: Metadata | None = None, first: Metadata | None = None) -> Metadata:
        """Of a step of a draft model; first: of the first step, whose table all steps have."""
        branches = num_reqs * draft.topk
        starts = None if draft.topk == 1 else torch.arange(0, branches + 1, draft.topk, dtype=torch.int32, device=self._first_slots.device)
        made = self.empty(num_reqs, branches, draft.topk, starts, first or buffers, draft.new_tokens)
        made.draft, made.shares_table = draft, first is not None
        made.step.seq_lens = self._new(num_reqs)
        if draft.topk > 1:
            tree = draft.tree().to(self._first_slots.device)
            bits = self._new(draft.topk, -(-draft.new_tokens // 8), dtype=torch.uint8)
            self._pack(tree, bits)
            made.step.masks = {"mask_bits": bits.repeat(num_reqs, 1), "mask_start": self._new(num_reqs)}
        if made.window_step is not None:
            made.window_step.seq_lens, made.window_step.masks = made.step.seq_lens, made.step.masks
        return made

    def fill(self, metadata: Metadata, forward_batch: Any) -> None:
        """Kernels of fixed shapes only, so that a graph may hold them."""
        step, window = metadata.step, metadata.window_step
        requests = step.num_reqs
        torch.add(forward_batch.seq_lens[:requests], metadata.new_tokens, out=step.seq_lens)
        if step.masks:
            step.masks["mask_start"].copy_(forward_batch.seq_lens[:requests])
            self.pack(metadata)
        if window is not None:
            slots = forward_batch.out_cache_loc
            if (draft := metadata.draft) is not None:  # which has those of all steps
                slots = per_step_draft_out_cache_loc(slots, requests, draft.topk, draft.num_steps)[draft.step]
            metadata.window_slots = self._full_to_swa[slots]  # type: ignore[index]
        if metadata.shares_table:
            return
        torch.index_select(self._first_slots, 0, forward_batch.req_pool_indices[:requests], out=step.block_table)
        if window is not None:
            window.block_table.copy_(self._full_to_swa[step.block_table.long()])  # type: ignore[index]
        if self._page_size > 1:
            step.block_table.floor_divide_(self._page_size)
            if window is not None:
                window.block_table.floor_divide_(self._page_size)

    def pack(self, metadata: Metadata) -> None:
        """The tree, which SGLang may write later than all else, as bits."""
        if metadata.tree is not None:
            self._pack(metadata.tree, metadata.step.masks["mask_bits"])

    def _pack(self, tree: torch.Tensor, bits: torch.Tensor) -> None:
        """tree bool [rows, new_tokens] -> bits uint8 [rows, bytes]."""
        wide = torch.nn.functional.pad(tree.view(torch.uint8), (0, 8 * bits.shape[1] - tree.shape[1]))
        torch.sum(wide.view(*bits.shape, 8) * self._powers, dim=-1, dtype=torch.uint8, out=bits)

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._first_slots.device)
