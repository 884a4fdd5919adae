# SPDX-License-Identifier: Apache-2.0
"""ATTUNE_MLA_SPARSE: latent attention of the tokens that vLLM's indexer has chosen, as in DeepSeek V3.2. Prompts of no more tokens
than are chosen go through the MLA prefill backend that vLLM chooses, new rows through vLLM's own operation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla import sparse_utils

import attune

from .._latent import queries, rope_apart
from .._plans import Plans
from . import coverage, kv_cache as caches
from .backend import Validated
from .step import Kinds

_DTYPES = ["auto", "float16", "bfloat16", "fp8_ds_mla"]
_HEADS, _LATENT, _TOPK = 16, 512, 2048  # the selector does not say them: AttuneMLASparseImpl asks again with the layer's
_MAX_DECODE_LEN = 128  # longer ones are prompts, which vLLM's own kernels take where they are short enough


@dataclass
class SparseStep:
    """What the layers of a step share. Nothing here waits for the device."""

    num_tokens: int
    topk_length: torch.Tensor  # int32 [num_tokens]: how many tokens the indexer could choose from, at most topk
    plans: Plans
    # By the kind of a layer and its rows: the layer that ran first, and the plan of all of them.
    scheduled: dict[tuple[str, int], tuple[AttuneMLASparseImpl, attune.Plan]] = field(default_factory=dict)

    def plan(self, impl: AttuneMLASparseImpl, cache: attune.KVCache) -> attune.Plan:
        return self.plans.find_sparse(impl, cache, self.num_tokens, impl.topk)

    def attend(self, impl: AttuneMLASparseImpl, cache: attune.KVCache, slots: torch.Tensor, out: torch.Tensor,
               **q: torch.Tensor) -> None:
        """q, and q_rope if the layer has it apart, of the first rows of the step; slots int32 [rows, topk]. As Step.attend."""
        key = impl.kind, out.shape[0]
        found = self.scheduled.get(key)
        if found is None:
            found = self.scheduled[key] = impl, self.plan(impl, cache)
        first, plan = found
        run = plan.run if first is impl else plan.run_scheduled
        run(**q, cache=cache, indices=slots, topk_length=self.topk_length[: out.shape[0]], out=out)


@dataclass(kw_only=True)
class AttuneMLASparseMetadata(SparseMLACommonMetadata):
    step: SparseStep | None = None


class AttuneMLASparseMetadataBuilder(SparseMLACommonMetadataBuilder[AttuneMLASparseMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = AttuneMLASparseMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(_MAX_DECODE_LEN, supports_spec_as_decode=True)
        self._numbers = torch.arange(len(self.req_id_per_token_buffer), dtype=torch.int32, device=device)
        self._topk_lengths = torch.empty_like(self._numbers)  # which captured graphs read in each replay
        self._plans = Plans(device)
        self._kinds = Kinds(vllm_config, layer_names, AttuneMLASparseImpl)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> AttuneMLASparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.step = SparseStep(metadata.num_actual_tokens, self._lengths(common_attn_metadata, metadata.req_id_per_token), self._plans)
        self._kinds.make_plans(metadata.num_actual_tokens, metadata.step)
        return metadata

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> torch.Tensor:
        """int32 [tokens]; of padding, the last request."""
        common = common_attn_metadata
        ids = self.req_id_per_token_buffer[: common.num_actual_tokens]
        torch.searchsorted(common.query_start_loc[1 : common.num_reqs + 1], self._numbers[: len(ids)], right=True, out_int32=True, out=ids)
        return ids.clamp_(max=common.num_reqs - 1)

    def _lengths(self, common: Any, request: torch.Tensor) -> torch.Tensor:
        """int32 [tokens]: the tokens that each one sees, at most topk."""
        before = common.seq_lens[: common.num_reqs] - common.query_start_loc[1 : common.num_reqs + 1]  # of a token with number -1
        lengths = torch.index_select(before, 0, request, out=self._topk_lengths[: len(request)])
        return lengths.add_(self._numbers[: len(request)]).add_(1).clamp_(0, self.topk_tokens)


class AttuneMLASparseImpl(SparseMLACommonImpl[AttuneMLASparseMetadata]):
    supports_pcp = False

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
                 sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
                 kv_sharing_target_layer_name: str | None, indexer: Any = None, topk_indices_buffer: torch.Tensor | None = None,
                 index_group_builder: Any = None, **mla: Any) -> None:
        """Raises NotImplementedError, by the name of the argument, for what is not covered."""
        for name, value in (("alibi_slopes", alibi_slopes), ("sliding_window", sliding_window), ("logits_soft_cap", logits_soft_cap)):
            if value:
                raise NotImplementedError(f"ATTUNE_MLA_SPARSE: {name}={value!r} is not covered")
        if kv_cache_dtype not in _DTYPES:
            raise NotImplementedError(f"ATTUNE_MLA_SPARSE: kv_cache_dtype={kv_cache_dtype!r} is not covered; {', '.join(_DTYPES)} are")
        config = get_current_vllm_config_or_none()
        if config is not None and (host := config.attention_config.hisparse_config) is not None:
            raise NotImplementedError(f"ATTUNE_MLA_SPARSE: hisparse_config={host!r} is not covered; FLASHMLA_SPARSE is for it")
        # Without the buffer here vLLM makes no index group, whose lists and streams we would not use.
        super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
                         attn_type, kv_sharing_target_layer_name, **mla)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        self.topk = _TOPK if self.topk_indices_buffer is None else self.topk_indices_buffer.shape[1]
        self.supports_quant_query_input = False
        self.num_kv_heads, self.head_size_v = 1, self.kv_lora_rank
        self.rope_apart = rope_apart(head_size, self.kv_lora_rank, self.qk_nope_head_dim)
        self.dtype = self.out_dtype = torch.get_default_dtype()
        self.returns_lse, self.forms = False, [self]
        self.arrays: dict[str, torch.Tensor | None] = {}
        self.fields: dict[str, Any] = {"softmax_scale": self.scale, "head_dim_v": self.kv_lora_rank}
        self.kind = repr((num_heads, head_size, self.dtype, kv_cache_dtype, self.topk, self.fields))
        refused = coverage.refusal(coverage.engine_capability(), num_heads=num_heads, num_kv_heads=1, head_size=head_size,
                                   dtype=self.dtype, kv_cache_dtype=kv_cache_dtype, block_size=None, topk=self.topk, **self.fields)
        if refused is not None:
            raise NotImplementedError(f"ATTUNE_MLA_SPARSE: {refused}")

    def make_plans(self, step: SparseStep, cache: attune.KVCache) -> None:
        step.plan(self, cache)

    def cache(self, layer: Any, kv_cache: torch.Tensor) -> attune.KVCache:
        """A view of the layer's cache, made once for each tensor that vLLM binds. The tensor keeps it, so that it goes with it."""
        views: dict[AttuneMLASparseImpl, attune.KVCache] = kv_cache.__dict__.setdefault("_attune_views", {})
        made = views.get(self)
        if made is None:
            made = views[self] = caches.latent_view(kv_cache, self.kv_cache_dtype, layer)
        return made

    def forward_mqa(self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor,
                    attn_metadata: AttuneMLASparseMetadata, layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q [tokens, num_heads, latent and rope channels], or both parts -> ([tokens, num_heads, latent channels], None)."""
        metadata, buffer = attn_metadata, self.topk_indices_buffer
        assert metadata.step is not None and buffer is not None
        q, q_rope = q if isinstance(q, tuple) else (q, None)
        out = q.new_empty(*q.shape[:-1], self.kv_lora_rank)
        slots = slots_of(buffer[: len(q)], metadata.req_id_per_token[: len(q)], metadata.block_table, metadata.block_size)
        metadata.step.attend(self, self.cache(layer, kv_c_and_k_pe_cache), slots, out, **queries(q, q_rope, self.rope_apart))
        return out, None


class AttuneMLASparseBackend(Validated, AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = _DTYPES

    @staticmethod
    def get_name() -> str:
        return "ATTUNE_MLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[AttuneMLASparseImpl]:
        return AttuneMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[AttuneMLASparseMetadataBuilder]:
        return AttuneMLASparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576, 512]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def refusal(cls, asked: dict[str, Any]) -> str | None:
        return coverage.refusal(asked["device_capability"], num_heads=_HEADS, num_kv_heads=1, head_size=asked["head_size"],
                                dtype=asked["dtype"], kv_cache_dtype=asked["kv_cache_dtype"], block_size=asked["block_size"],
                                topk=_TOPK, head_dim_v=_LATENT)


def slots_of(tokens: torch.Tensor, request: torch.Tensor, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where chosen tokens lie: tokens int32 [rows, topk], numbers in their request or -1 -> slots, int32, those that there are first.

    On a GPU that is vLLM's own kernel, one launch.
    """
    if HAS_TRITON:
        slots, _ = sparse_utils.triton_convert_req_index_to_global_index(
            request, block_table, tokens, BLOCK_SIZE=block_size, NUM_TOPK_TOKENS=tokens.shape[1], return_valid_counts=True)
        return slots
    blocks = torch.div(tokens, block_size, rounding_mode="floor")
    there = (tokens >= 0) & (blocks < block_table.shape[1])
    block = block_table[request.unsqueeze(1), torch.where(there, blocks, 0)]
    slots = torch.where(there, block * block_size + tokens % block_size, -1)
    return slots.gather(1, there.to(torch.uint8).argsort(dim=1, descending=True, stable=True))
