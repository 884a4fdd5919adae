# SPDX-License-Identifier: Apache-2.0
"""What the layers of a step share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

import attune

from .plans import Plans

if TYPE_CHECKING:
    from .impl import AttuneImpl


@dataclass
class AttuneMetadata(AttentionMetadata):
    """A batch. Lengths and tables are on the device, and nothing here waits for them."""

    num_actual_tokens: int  # rows of q; in a full CUDA graph, padded
    num_reqs: int
    max_query_len: int
    max_seq_len: int  # at least the longest; vLLM says max_model_len where it captures a graph
    query_start_loc: torch.Tensor | None  # int32 [num_reqs + 1]; None: each request has one query
    seq_lens: torch.Tensor  # int32 [num_reqs], with the queries' own tokens
    block_table: torch.Tensor  # int32 [num_reqs, blocks]
    slot_mapping: torch.Tensor  # int64 [tokens]
    plans: Plans
    # By the kind of a layer: the layer that ran first, and the plan of all of them.
    scheduled: dict[str, tuple[AttuneImpl, attune.Plan]] = field(default_factory=dict)

    def plan(self, impl: AttuneImpl, cache: attune.KVCache) -> attune.Plan:
        return self.plans.find(impl, cache, self.query_start_loc is None, self.num_actual_tokens, self.num_reqs,
                               self.max_query_len, self.max_seq_len, self.block_table.shape[1])

    def attend(self, impl: AttuneImpl, q: torch.Tensor, cache: attune.KVCache, out: torch.Tensor) -> None:
        """q, out: [num_actual_tokens, num_heads, head_size]. The first layer of a kind makes the schedule, the others use it.

        The schedule is a kernel beside that layer's: in a captured graph it is part of the graph, and is made anew from the
        lengths of each replay. A layer that comes round again, as in a capture after a warm-up, makes it again.
        """
        found = self.scheduled.get(impl.kind)
        if found is None:
            found = self.scheduled[impl.kind] = impl, self.plan(impl, cache)
        first, plan = found
        cache.page_table = self.block_table
        run = plan.run if first is impl else plan.run_scheduled
        run(q=q, cache=cache, out=out, seqused_kv=self.seq_lens, cu_seqlens_q=self.query_start_loc, sinks=impl.sinks,
            alibi_slopes=impl.alibi_slopes)


class AttuneMetadataBuilder(AttentionMetadataBuilder[AttuneMetadata]):
    # Whatever depends on lengths is done on the device, by kernels that are in the graph.
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._plans = Plans(device)
        self._one_of_each: list[tuple[Any, AttuneImpl]] | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> AttuneMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("ATTUNE: causal is not True; only causal attention is covered")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name) is not None:
                raise NotImplementedError(f"ATTUNE: {name} is given; such masks are not covered")
        reqs = common.num_reqs
        decode = common.max_query_len == 1 and common.num_actual_tokens == reqs
        made = AttuneMetadata(
            num_actual_tokens=common.num_actual_tokens, num_reqs=reqs, max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=None if decode else _first(common.query_start_loc, reqs + 1),
            seq_lens=_first(common.seq_lens, reqs), block_table=_first(common.block_table_tensor, reqs),
            slot_mapping=common.slot_mapping, plans=self._plans)
        if made.num_actual_tokens:
            for layer, impl in self._layers():  # so that no plan has to be made while a graph is captured
                made.plan(impl, impl.cache(layer, layer.kv_cache))
        return made

    def _layers(self) -> list[tuple[Any, AttuneImpl]]:
        """A layer of each kind; none before vLLM has bound the caches."""
        if self._one_of_each is None:
            from .impl import AttuneImpl

            found: dict[str, tuple[Any, AttuneImpl]] = {}
            for layer in get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names).values():
                if layer.kv_cache.numel() == 0:
                    return []
                for impl in layer.impl.get_impl_variants():
                    if isinstance(impl, AttuneImpl):
                        impl.cache(layer, layer.kv_cache)  # completes its kind
                        found.setdefault(impl.kind, (layer, impl))
            self._one_of_each = list(found.values())
        return self._one_of_each


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == rows else tensor[:rows]
