# SPDX-License-Identifier: Apache-2.0
"""What the attention layers of an engine's step share: lengths, tables, plans, and a schedule for each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import attune

from ._plans import Plans


class Attending(Protocol):
    """Attention of a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    rope_apart: int  # of head_size, the channels that come as q_rope; 0: queries are whole
    dtype: torch.dtype
    kind: str  # layers of the same kind share plans and schedules
    fields: dict[str, Any]  # what attune.attention takes beside the arrays
    arrays: dict[str, torch.Tensor | None]  # of a layer: sinks and slopes
    out_dtype: torch.dtype
    returns_lse: bool


@dataclass(eq=False)
class Form:
    """Another form in which a layer attends: other heads, another output."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    rope_apart: int
    dtype: torch.dtype
    kind: str
    fields: dict[str, Any]
    arrays: dict[str, torch.Tensor | None]
    out_dtype: torch.dtype
    returns_lse: bool

    @staticmethod
    def of(impl: Attending, **changes: Any) -> Form:
        """impl with changes, which are part of its kind."""
        same = {name: getattr(impl, name) for name in Form.__dataclass_fields__}
        return Form(**{**same, "kind": repr((impl.kind, changes)), **changes})


@dataclass
class Step:
    """Lengths and tables are on the device, and nothing here waits for them."""

    num_tokens: int  # rows of q; in a full CUDA graph, padded
    num_reqs: int
    max_query_len: int
    max_seq_len: int  # at least the longest; where a graph is captured, of any replay
    query_start_loc: torch.Tensor | None  # int32 [num_reqs + 1]; None: each request has one query
    seq_lens: torch.Tensor  # int32 [num_reqs], with the queries' own tokens
    block_table: torch.Tensor  # int32 [num_reqs, blocks]
    plans: Plans
    masks: dict[str, torch.Tensor] = field(default_factory=dict)  # mask_bits and mask_start, where queries do not see all before them
    # By the kind of a layer: the layer that ran first, and the plan of all of them.
    scheduled: dict[str, tuple[Attending, attune.Plan]] = field(default_factory=dict)

    @staticmethod
    def of(plans: Plans, num_tokens: int, num_reqs: int, max_query_len: int, max_seq_len: int, query_start_loc: torch.Tensor | None,
           seq_lens: torch.Tensor, block_table: torch.Tensor) -> Step:
        """Tensors may have more rows than there are requests. query_start_loc None: each request has one query."""
        decode = max_query_len == 1 and num_tokens == num_reqs
        starts = None if decode or query_start_loc is None else _first(query_start_loc, num_reqs + 1)
        return Step(num_tokens, num_reqs, max_query_len, max_seq_len, starts, _first(seq_lens, num_reqs),
                    _first(block_table, num_reqs), plans)

    def plan(self, impl: Attending, cache: attune.KVCache | None) -> attune.Plan:
        return self.plans.find(impl, cache, self.query_start_loc is None, self.num_tokens, self.num_reqs, self.max_query_len,
                               self.max_seq_len, self.block_table.shape[1], self.masks["mask_bits"].shape[1] if self.masks else 0)

    def attend(self, impl: Attending, q: torch.Tensor, cache: attune.KVCache, out: torch.Tensor, **more: torch.Tensor) -> None:
        """q, out: [num_tokens, num_heads, head_size]. more: q_rope, where impl has it apart; lse, float32 [num_tokens, num_heads], where
        impl returns it; out_scale, float32 [1], where its out has 8 bits. The first layer of a kind makes the schedule, the others use
        it.

        The schedule is a kernel beside that layer's: in a captured graph it is part of the graph, and is made anew from the
        lengths of each replay. A layer that comes round again, as in a capture after a warm-up, makes it again.
        """
        cache.page_table = self.block_table
        self._runner(impl, cache)(q=q, cache=cache, out=out, seqused_kv=self.seq_lens, cu_seqlens_q=self.query_start_loc,
                                  **impl.arrays, **self.masks, **more)

    def attend_new(self, impl: Attending, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                   **outputs: torch.Tensor) -> None:
        """As `attend`, of the step's own tokens among themselves: k, v [num_tokens, num_kv_heads, ...]."""
        self._runner(impl, None)(q=q, k=k, v=v, out=out, cu_seqlens_q=self.query_start_loc, **impl.arrays, **outputs)

    def _runner(self, impl: Attending, cache: attune.KVCache | None) -> Any:
        found = self.scheduled.get(impl.kind)
        if found is None:
            found = self.scheduled[impl.kind] = impl, self.plan(impl, cache)
        first, plan = found
        return plan.run if first is impl else plan.run_scheduled


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == rows else tensor[:rows]
