# SPDX-License-Identifier: Apache-2.0
"""ATTUNE_MLA: multi-head latent attention. Decode is Attune's; prompts go through the MLA prefill backend that vLLM chooses, and new
rows through vLLM's own operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

import attune

from .._latent import queries, rope_apart
from .._plans import Plans
from .._step import Attending, Form, Step
from . import coverage, kv_cache as caches
from .backend import Validated
from .step import Kinds

_DTYPES = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
_HEADS, _LATENT, _ROPE = 16, 512, 64  # the selector does not say them: AttuneMLAImpl asks again with the layer's


@dataclass
class AttuneMLADecodeMetadata(MLACommonDecodeMetadata):
    step: Step


@dataclass
class AttuneMLAMetadata(MLACommonMetadata[AttuneMLADecodeMetadata]):
    pass


class AttuneMLAMetadataBuilder(MLACommonMetadataBuilder[AttuneMLAMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if vllm_config.parallel_config.decode_context_parallel_size > 1:  # where only single tokens are decode, see AttuneMLAImpl
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, AttuneMLAMetadata)
        self._plans = Plans(device)
        self._kinds = Kinds(vllm_config, layer_names, AttuneMLAImpl)

    def _build_decode(self, block_table_tensor: torch.Tensor, seq_lens_device: torch.Tensor, max_seq_len: int,
                      query_start_loc_cpu: torch.Tensor, query_start_loc_device: torch.Tensor, num_decode_tokens: int,
                      max_query_len: int, dcp_tot_seq_lens_device: torch.Tensor | None) -> AttuneMLADecodeMetadata:
        step = Step.of(self._plans, num_decode_tokens, seq_lens_device.shape[0], max_query_len, max_seq_len, query_start_loc_device,
                       seq_lens_device, block_table_tensor)
        self._kinds.make_plans(num_decode_tokens, step)
        return AttuneMLADecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, step)


class AttuneMLAImpl(MLACommonImpl[AttuneMLAMetadata]):
    """With decode context parallelism, q has the heads of all ranks and the cache some of the keys. Its lse is a natural logarithm, as
    vLLM's lse_base_on_e says. Speculative tokens are prompts then: which of a rank's keys one sees is not what `causal` says."""

    supports_pcp = False
    supports_dcp = True
    can_return_lse_for_decode = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
                 sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
                 kv_sharing_target_layer_name: str | None, **mla: Any) -> None:
        """Raises NotImplementedError, by the name of the argument, for what is not covered."""
        for name, value in (("alibi_slopes", alibi_slopes), ("sliding_window", sliding_window), ("logits_soft_cap", logits_soft_cap),
                            ("indexer", mla.get("indexer"))):
            if value:
                raise NotImplementedError(f"ATTUNE_MLA: {name}={value!r} is not covered")
        if kv_cache_dtype not in _DTYPES:
            raise NotImplementedError(f"ATTUNE_MLA: kv_cache_dtype={kv_cache_dtype!r} is not covered; {', '.join(_DTYPES)} are")
        super().__init__(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
                         attn_type, kv_sharing_target_layer_name, **mla)
        self.supports_quant_query_input = False
        self.num_kv_heads, self.head_size_v = 1, self.kv_lora_rank
        self.rope_apart = rope_apart(head_size, self.kv_lora_rank, self.qk_nope_head_dim)
        self.dtype = self.out_dtype = torch.get_default_dtype()
        self.arrays: dict[str, torch.Tensor | None] = {}
        self.fields: dict[str, Any] = {"causal": True, "softmax_scale": self.scale, "head_dim_v": self.kv_lora_rank}
        self.kind = repr((num_heads, head_size, self.dtype, kv_cache_dtype, self.fields))
        self.returns_lse = self.need_to_return_lse_for_decode
        self.forms: list[Attending] = [self]
        if self.dcp_world_size > 1:
            self.rope_apart = 0  # rows come whole, gathered from all ranks
            self.forms = [Form.of(self, num_heads=num_heads * self.dcp_world_size)]
        refused = coverage.refusal(coverage.engine_capability(), num_heads=self.forms[0].num_heads, num_kv_heads=1, head_size=head_size,
                                   dtype=self.dtype, kv_cache_dtype=kv_cache_dtype, block_size=None, returns_lse=self.returns_lse,
                                   **self.fields)
        if refused is not None:
            raise NotImplementedError(f"ATTUNE_MLA: {refused}")

    def make_plans(self, step: Step, cache: attune.KVCache) -> None:
        step.plan(self.forms[0], cache)

    def cache(self, layer: Any, kv_cache: torch.Tensor) -> attune.KVCache:
        """A view of the layer's cache, made once for each tensor that vLLM binds. The tensor keeps it, so that it goes with it."""
        views: dict[AttuneMLAImpl, attune.KVCache] = kv_cache.__dict__.setdefault("_attune_views", {})
        made = views.get(self)
        if made is None:
            made = views[self] = caches.latent_view(kv_cache, self.kv_cache_dtype, layer)
        return made

    def forward_mqa(self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor,
                    attn_metadata: AttuneMLAMetadata, layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q [tokens, num_heads, latent and rope channels], or both parts -> ([tokens, num_heads, latent channels], lse float32
        [tokens, num_heads] where ranks are combined)."""
        decode = attn_metadata.decode
        assert decode is not None
        q, q_rope = q if isinstance(q, tuple) else (q, None)
        out = q.new_empty(*q.shape[:-1], self.kv_lora_rank)
        outputs = {"lse": q.new_empty(q.shape[:-1], dtype=torch.float32)} if self.returns_lse else {}
        decode.step.attend(self.forms[0], cache=self.cache(layer, kv_c_and_k_pe_cache), out=out, **queries(q, q_rope, self.rope_apart),
                           **outputs)
        return out, outputs.get("lse")


class AttuneMLABackend(Validated, MLACommonBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = _DTYPES

    @staticmethod
    def get_name() -> str:
        return "ATTUNE_MLA"

    @staticmethod
    def get_impl_cls() -> type[AttuneMLAImpl]:
        return AttuneMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AttuneMLAMetadataBuilder]:
        return AttuneMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def refusal(cls, asked: dict[str, Any]) -> str | None:
        head_size = asked["head_size"]
        latent = _LATENT if head_size >= _LATENT else head_size - _ROPE
        return coverage.refusal(asked["device_capability"], num_heads=_HEADS, num_kv_heads=1, head_size=head_size, dtype=asked["dtype"],
                                kv_cache_dtype=asked["kv_cache_dtype"], block_size=asked["block_size"], causal=True,
                                head_dim_v=latent, returns_lse=asked.get("use_dcp", False))
