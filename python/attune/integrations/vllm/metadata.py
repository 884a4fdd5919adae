# SPDX-License-Identifier: Apache-2.0
"""Metadata of the dense backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from .._plans import Plans
from .._step import Step
from .context_parallel import ParallelStep, ParallelSteps
from .output_scales import Known, OutputScales
from .step import Kinds


@dataclass
class AttuneMetadata(AttentionMetadata):
    num_actual_tokens: int
    slot_mapping: torch.Tensor  # int64 [tokens]
    step: Step
    output_scales: OutputScales
    parallel: ParallelStep | None = None  # instead of step, where ranks share a sequence


class AttuneMetadataBuilder(AttentionMetadataBuilder[AttuneMetadata]):
    # Whatever depends on lengths is done on the device, by kernels that are in the graph.
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        from .impl import AttuneImpl

        self._plans = Plans(device)
        self._parallel = ParallelSteps(kv_cache_spec, vllm_config, device)
        self._output_scales: Known = {}
        self._kinds = Kinds(vllm_config, layer_names, AttuneImpl)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> AttuneMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("ATTUNE: causal is not True; only causal attention is covered")
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name) is not None:
                raise NotImplementedError(f"ATTUNE: {name} is given; such masks are not covered")
        step = Step.of(self._plans, common.num_actual_tokens, common.num_reqs, common.max_query_len, common.max_seq_len,
                       common.query_start_loc, common.seq_lens, common.block_table_tensor)
        parallel = self._parallel.make(self._plans, step, common) if self._parallel.world_size > 1 else None
        self._kinds.make_plans(step.num_tokens, step if parallel is None else parallel)
        return AttuneMetadata(common.num_actual_tokens, common.slot_mapping, step, OutputScales(self._output_scales), parallel)
