# SPDX-License-Identifier: Apache-2.0
"""What the layers of a batch share: lengths and page tables, made on the device from SGLang's own arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._plans import Plans
from .._step import Step


@dataclass
class Metadata:
    step: Step  # of layers whose keys lie in the pool of all tokens
    window_step: Step | None = None  # of layers in SWAKVPool's other pool, whose slots have other numbers
    window_slots: torch.Tensor | None = None  # int64 [tokens and padding]: where those layers' new keys go
    new_tokens: int = 0  # a request's tokens that seq_lens leaves out: those that are verified
    tree: torch.Tensor | None = None  # bool [tokens, new_tokens]: which of a request's new tokens each one sees


class Tables:
    """Makes metadata. SGLang has a slot of each token in req_to_token [requests, tokens]; attention wants pages of requests."""

    def __init__(self, req_to_token: torch.Tensor, page_size: int, full_to_swa: torch.Tensor | None, max_seq_len: int,
                 plans: Plans) -> None:
        """full_to_swa: a slot of SWAKVPool's other pool for each slot, int64. max_seq_len: of any request."""
        self._first_slots = req_to_token[:, ::page_size]  # of each page
        self._page_size = page_size
        self._full_to_swa = full_to_swa
        self._max_seq_len = max_seq_len
        self._plans = plans
        self._powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=req_to_token.device)

    def empty(self, num_reqs: int, num_tokens: int, max_query_len: int, query_start_loc: torch.Tensor | None,
              buffers: Metadata | None = None, new_tokens: int = 0, tree: torch.Tensor | None = None) -> Metadata:
        """Metadata that `fill` completes, in the first rows of buffers if there are any."""

        def step(like: Step | None) -> Step:
            lengths = self._new(num_reqs) if like is None else like.seq_lens
            table = self._new(num_reqs, self._first_slots.shape[1]) if like is None else like.block_table
            return Step.of(self._plans, num_tokens, num_reqs, max_query_len, self._max_seq_len, query_start_loc, lengths, table)

        made = Metadata(step(None if buffers is None else buffers.step), new_tokens=new_tokens, tree=tree)
        if tree is not None:
            made.step.masks = {"mask_bits": self._new(len(tree), -(-new_tokens // 8), dtype=torch.uint8), "mask_start": self._new(num_reqs)}
        if self._full_to_swa is not None:
            made.window_step = step(None if buffers is None else buffers.window_step)
            made.window_step.seq_lens, made.window_step.masks = made.step.seq_lens, made.step.masks
        return made

    def fill(self, metadata: Metadata, forward_batch: Any) -> None:
        """Kernels of fixed shapes only, so that a graph may hold them."""
        step, window = metadata.step, metadata.window_step
        requests = step.num_reqs
        torch.add(forward_batch.seq_lens[:requests], metadata.new_tokens, out=step.seq_lens)
        if metadata.tree is not None:
            step.masks["mask_start"].copy_(forward_batch.seq_lens[:requests])
            self.pack(metadata)
        torch.index_select(self._first_slots, 0, forward_batch.req_pool_indices[:requests], out=step.block_table)
        if window is not None:
            window.block_table.copy_(self._full_to_swa[step.block_table.long()])  # type: ignore[index]
            metadata.window_slots = self._full_to_swa[forward_batch.out_cache_loc]  # type: ignore[index]
        if self._page_size > 1:
            step.block_table.floor_divide_(self._page_size)
            if window is not None:
                window.block_table.floor_divide_(self._page_size)

    def pack(self, metadata: Metadata) -> None:
        """The tree, which SGLang may write later than all else, as bits."""
        if metadata.tree is not None:
            bits = metadata.step.masks["mask_bits"]
            wide = torch.nn.functional.pad(metadata.tree.view(torch.uint8), (0, 8 * bits.shape[1] - metadata.tree.shape[1]))
            torch.sum(wide.view(*bits.shape, 8) * self._powers, dim=-1, dtype=torch.uint8, out=bits)

    def _new(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._first_slots.device)
