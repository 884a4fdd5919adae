# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backend import AttentionImpl, AttentionType

import attune

from .._step import Attending, Form
from . import coverage, kv_cache as caches
from .context_parallel import ContextParallel
from .metadata import AttuneMetadata


class AttuneImpl(AttentionImpl[AttuneMetadata]):
    supports_dcp = True
    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: str | None = None, sinks: torch.Tensor | None = None,
                 use_alibi_sqrt: bool = False, **others: Any) -> None:
        """Raises NotImplementedError, by the name of the argument, for what is not covered."""
        for name, value in others.items():
            raise NotImplementedError(f"ATTUNE: {name}={value!r} is not covered")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"ATTUNE: attn_type={attn_type!r} is not covered; {AttentionType.DECODER.value!r} is")
        if kv_cache_dtype not in caches.DTYPES:
            raise NotImplementedError(f"ATTUNE: kv_cache_dtype={kv_cache_dtype!r} is not covered; {', '.join(caches.DTYPES)} are")
        self.num_heads = num_heads
        self.head_size = self.head_size_v = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        self.arrays: dict[str, torch.Tensor | None] = {"alibi_slopes": slopes}
        self.returns_lse, self.rope_apart = False, 0
        self.dtype = self.out_dtype = torch.get_default_dtype()  # of the model, which vLLM sets while it makes the layers

        self.fields: dict[str, Any] = {"causal": True, "softmax_scale": self.scale}
        if sliding_window is not None:
            self.fields["window_left"] = sliding_window - 1
        if logits_soft_cap:
            self.fields["softcap"] = float(logits_soft_cap)
        if use_alibi_sqrt and alibi_slopes is not None:
            self.fields["alibi_sqrt"] = True
        self._made_with = (num_heads, self.num_kv_heads, head_size, self.dtype, kv_cache_dtype, sinks is not None,
                           alibi_slopes is not None, self.fields)
        self.kind = ""
        self.forms: list[Attending] = [self]  # as far as is known, before there are metadata
        self._quantises = False  # as far as the profiling run has said

        self._parallel: ContextParallel | None = None
        if self.dcp_world_size > 1:
            try:
                self._parallel = ContextParallel(self)
            except NotImplementedError as error:
                raise NotImplementedError(f"ATTUNE: {error}") from None
        refused = self._refusal() if self._parallel is None else self._parallel.refusal(self)
        if refused is not None:
            raise NotImplementedError(f"ATTUNE: {refused}")

    def _refusal(self, out_dtype: torch.dtype | None = None) -> str | None:
        return coverage.refusal(coverage.engine_capability(), num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
                                head_size=self.head_size, dtype=self.dtype, kv_cache_dtype=self.kv_cache_dtype, block_size=None,
                                sinks=self.sinks is not None, alibi=self.arrays["alibi_slopes"] is not None, out_dtype=out_dtype,
                                **self.fields)

    def make_plans(self, step: Any, cache: attune.KVCache) -> None:
        """step: a Step, or a ParallelStep."""
        if self._parallel is not None:
            self._parallel.make_plans(step, cache)
            return
        for form in self.forms:
            step.plan(form, cache)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return quant_key == kFp8StaticTensorSym and self._refusal(quant_key.dtype) is None

    def cache(self, layer: Any, kv_cache: torch.Tensor) -> attune.KVCache:
        """Views of the layer's cache, made once for each tensor that vLLM binds. The tensor keeps them, so that they go with it."""
        views: dict[AttuneImpl, attune.KVCache] = kv_cache.__dict__.setdefault("_attune_views", {})
        made = views.get(self)
        if made is None:
            made = views[self] = caches.view(kv_cache, self.kv_cache_dtype, self.head_size, layer)
            self.kind = repr((self._made_with, getattr(made.k_scale, "shape", None)))
            self.arrays["sinks"] = None if self.sinks is None else self.sinks.detach()  # which are loaded by now
            self._quantised = Form.of(self, out_dtype=kFp8StaticTensorSym.dtype)
            self.forms = [self, self._quantised] if self._quantises else [self]
            if self._parallel is not None:
                self._parallel.take_kind(self)
        return made

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        """Writes key, value [tokens, num_kv_heads, head_size] to slot_mapping, int64 [tokens or fewer]; -1 is skipped."""
        tokens = slot_mapping.shape[0]
        if key.shape[0] != tokens:
            key, value = key[:tokens], value[:tokens]
        cache = self.cache(layer, kv_cache)
        cache.page_table = None  # slots are places in memory
        attune.cache_append(cache, key, value, slots=slot_mapping)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None,
                kv_cache: torch.Tensor, attn_metadata: AttuneMetadata | None, output: torch.Tensor,
                output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Writes output, like query [tokens, num_heads, head_size], from the cache, which holds key and value already. With output_scale,
        one number, output is e4m3."""
        if output_block_scale is not None:
            raise NotImplementedError("ATTUNE: output_block_scale is given; outputs of e4m3 with a scale per tensor are covered")
        if attn_metadata is None:  # the profiling run
            if output_scale is not None:
                self._will_quantise(output_scale)
            return output.fill_(0)
        rows = attn_metadata.num_actual_tokens
        if rows == 0:
            return output
        cache, out = self.cache(layer, kv_cache), output
        if query.shape[0] != rows:
            query, out = query[:rows], output[:rows]
        if output_scale is None and self._parallel is None:
            attn_metadata.step.attend(self, query, cache, out)
            return output
        out_scale = None if output_scale is None else attn_metadata.output_scales.reciprocal(self, output_scale)
        if self._parallel is None:
            attn_metadata.step.attend(self._quantised, query, cache, out, out_scale=out_scale)
        else:
            assert attn_metadata.parallel is not None
            key, value = (None if x is None else x[:rows] for x in (key, value))
            self._parallel.attend(attn_metadata.parallel, query, key, value, cache, self.arrays["sinks"], out, out_scale)
        return output

    def _will_quantise(self, output_scale: torch.Tensor) -> None:
        """vLLM asks fused_output_quant_supported of one layer, which need not be this one."""
        if output_scale.numel() != 1:
            raise NotImplementedError(f"ATTUNE: output_scale has shape {tuple(output_scale.shape)}; one scale is covered")
        if (refused := self._refusal(kFp8StaticTensorSym.dtype)) is not None:
            raise NotImplementedError(f"ATTUNE: output_scale is given: {refused}")
        self._quantises = True
