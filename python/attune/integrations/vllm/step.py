# SPDX-License-Identifier: Apache-2.0
"""What the layers of a step share: lengths, tables, plans, and a schedule for each kind of layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

import attune

from .plans import Plans


class Attending(Protocol):
    """An implementation of a layer's attention."""

    num_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    kind: str  # layers of the same kind share plans and schedules; "" before `cache` was called
    fields: dict[str, Any]  # what attune.attention takes beside the arrays
    arrays: dict[str, torch.Tensor | None]  # of a layer: sinks and slopes

    def cache(self, layer: Any, kv_cache: torch.Tensor) -> attune.KVCache: ...


@dataclass
class Step:
    """Lengths and tables are on the device, and nothing here waits for them."""

    num_tokens: int  # rows of q; in a full CUDA graph, padded
    num_reqs: int
    max_query_len: int
    max_seq_len: int  # at least the longest; vLLM says max_model_len where it captures a graph
    query_start_loc: torch.Tensor | None  # int32 [num_reqs + 1]; None: each request has one query
    seq_lens: torch.Tensor  # int32 [num_reqs], with the queries' own tokens
    block_table: torch.Tensor  # int32 [num_reqs, blocks]
    plans: Plans
    # By the kind of a layer: the layer that ran first, and the plan of all of them.
    scheduled: dict[str, tuple[Attending, attune.Plan]] = field(default_factory=dict)

    @staticmethod
    def of(plans: Plans, num_tokens: int, num_reqs: int, max_query_len: int, max_seq_len: int, query_start_loc: torch.Tensor,
           seq_lens: torch.Tensor, block_table: torch.Tensor) -> Step:
        """Tensors may have more rows than there are requests."""
        decode = max_query_len == 1 and num_tokens == num_reqs
        return Step(num_tokens, num_reqs, max_query_len, max_seq_len, None if decode else _first(query_start_loc, num_reqs + 1),
                    _first(seq_lens, num_reqs), _first(block_table, num_reqs), plans)

    def plan(self, impl: Attending, cache: attune.KVCache) -> attune.Plan:
        return self.plans.find(impl, cache, self.query_start_loc is None, self.num_tokens, self.num_reqs, self.max_query_len,
                               self.max_seq_len, self.block_table.shape[1])

    def attend(self, impl: Attending, q: torch.Tensor, cache: attune.KVCache, out: torch.Tensor) -> None:
        """q, out: [num_tokens, num_heads, head_size]. The first layer of a kind makes the schedule, the others use it.

        The schedule is a kernel beside that layer's: in a captured graph it is part of the graph, and is made anew from the
        lengths of each replay. A layer that comes round again, as in a capture after a warm-up, makes it again.
        """
        found = self.scheduled.get(impl.kind)
        if found is None:
            found = self.scheduled[impl.kind] = impl, self.plan(impl, cache)
        first, plan = found
        cache.page_table = self.block_table
        run = plan.run if first is impl else plan.run_scheduled
        run(q=q, cache=cache, out=out, seqused_kv=self.seq_lens, cu_seqlens_q=self.query_start_loc, **impl.arrays)


class Kinds:
    """A layer of each kind among those of a metadata builder."""

    def __init__(self, vllm_config: Any, layer_names: list[str], of: type[Any]) -> None:
        self._vllm_config, self._layer_names, self._of = vllm_config, layer_names, of
        self._found: list[tuple[Any, Attending]] | None = None

    def make_plans(self, step: Step) -> None:
        """So that none has to be made while a graph is captured. Does nothing before vLLM has bound the caches."""
        if step.num_tokens == 0:
            return
        if self._found is None:
            layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase, self._layer_names).values()
            if any(layer.kv_cache.numel() == 0 for layer in layers):
                return
            kinds: dict[str, tuple[Any, Attending]] = {}
            for layer, impl in self._impls(layers):
                impl.cache(layer, layer.kv_cache)  # completes its kind
                kinds.setdefault(impl.kind, (layer, impl))
            self._found = list(kinds.values())
        for layer, impl in self._found:
            step.plan(impl, impl.cache(layer, layer.kv_cache))

    def _impls(self, layers: Any) -> Iterator[tuple[Any, Attending]]:
        for layer in layers:
            for impl in layer.impl.get_impl_variants():
                if isinstance(impl, self._of):
                    yield layer, impl


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == rows else tensor[:rows]
