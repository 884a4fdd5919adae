# SPDX-License-Identifier: Apache-2.0
"""What is refused when a server starts, by the field, its value, and the backend of SGLang's own to go to instead."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import get_dsa_index_kpool
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

import attune

from .._coverage import Capability, named, why_not
from .._plans import query_specs, spec
from .._step import Attending

_ALGORITHMS = ("NONE", "EAGLE", "EAGLE3", "STANDALONE")
_CHAINS = ("DFLASH", "DSPARK")  # which the target verifies as chains; their draft models are not causal
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2)


def refuse(field: str, value: Any, nearest: str) -> None:
    raise NotImplementedError(f"attune: {field}={value!r} is not covered; nearest backend of SGLang that takes it: {nearest}")


def check_runner(runner: Any) -> None:
    """Raises NotImplementedError for a server that is not covered, whatever its layers."""
    mla = runner.use_mla_backend
    device = str(runner.device).partition(":")[0]
    if device not in ("cuda", "cpu"):
        refuse("device", runner.device, "torch_native")
    algorithm = _algorithm(runner)
    if runner.is_draft_worker and algorithm in _CHAINS:
        refuse("speculative_draft_attention_backend", "attune", "flashinfer (--speculative-draft-attention-backend flashinfer)")
    if algorithm not in _ALGORITHMS + _CHAINS:
        refuse("speculative_algorithm", algorithm, "triton")
    if runner.model_config.is_encoder_decoder:
        refuse("is_encoder_decoder", True, "flashinfer")
    if (dllm := get_exec().dllm.dllm_algorithm) is not None:
        refuse("dllm_algorithm", dllm, "flashinfer")
    if get_parallel().dcp_enabled:
        refuse("dcp_size", get_parallel().attn_dcp_size, "flashinfer")
    if (size := get_parallel().attn_cp_size) > 1:
        refuse("attn_cp_size", size, "fa3")
    if runner.kv_index_translator.is_translating:
        refuse("enable_unified_memory", True, "triton")
    _check_pool(runner.token_to_kv_pool, mla)
    if runner.dtype not in _DTYPES:
        refuse("dtype", runner.dtype, "triton")


def _algorithm(runner: Any) -> str:
    return getattr(runner.spec_algorithm, "name", str(runner.spec_algorithm))


def drafts(runner: Any) -> bool:
    """Whether tokens are drafted, so that rows of the table of tokens have places for them."""
    return _algorithm(runner) != "NONE"


def drafts_are_trees(runner: Any) -> bool:
    return drafts(runner) and (get_spec().speculative_eagle_topk or 1) > 1


def is_sparse(runner: Any) -> bool:
    """Whether layers attend to tokens that an indexer chooses."""
    return type(runner.token_to_kv_pool) is DSATokenToKVPool


def check_sparse(runner: Any) -> None:
    """Raises NotImplementedError for a model with an indexer that is not covered, beside what check_runner refuses."""
    config = runner.model_config.hf_config
    if runner.is_draft_worker:
        refuse("speculative_draft_attention_backend", "attune", "dsa (--speculative-draft-attention-backend dsa)")
    if drafts_are_trees(runner):
        refuse("speculative_eagle_topk", get_spec().speculative_eagle_topk, "none (1 is covered)")
    if _algorithm(runner) == "DSPARK":  # whose chains have unequal lengths, unlike those of SGLang's metadata
        refuse("speculative_algorithm", "DSPARK", "none (EAGLE is covered)")
    if (size := get_dsa_index_kpool(config)) > 1:
        refuse("index_kpool", size, "dsa")
    if getattr(config, "learnable_sink", False):
        refuse("learnable_sink", True, "dsa")
    if runner.hisparse_coordinator is not None:
        refuse("enable_hisparse", True, "dsa")


def check_draft(runner: Any, topk: int) -> None:
    """Raises NotImplementedError for a draft model whose decode is not covered, beside what check_runner refuses. topk: branches."""
    native = getattr(runner, "sliding_window_size", None) or 0
    if (size := get_spec().speculative_draft_window_size or 0) > 0 and native <= 0:  # else it is the layers' own, or ignored
        refuse("speculative_draft_window_size", size, "triton")
    if topk == 1:
        return
    if runner.page_size > 1:
        refuse("speculative_eagle_topk", topk, "fa3 (or --page-size 1)")
    for module in runner.model.modules():
        if isinstance(module, RadixAttention) and module.sliding_window_size is not None and module.sliding_window_size > -1:
            refuse("speculative_eagle_topk", topk, "triton (or 1, as layers of the draft model have a sliding window)")


def _check_pool(pool: Any, mla: bool) -> None:
    wanted: type[Any] = MLATokenToKVPool if mla else MHATokenToKVPool
    if type(pool) is DSATokenToKVPool and mla:
        wanted = DSATokenToKVPool
    parts = [pool]
    if type(pool) is SWAKVPool and not mla:
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
    elif type(pool) is HybridLinearKVPool and not mla:
        parts = [pool.full_kv_pool]
    for part in parts:
        if type(part) is not wanted:
            nearest = {"MHATokenToKVPoolFP4": "flashinfer"}.get(type(part).__name__, "triton")
            refuse("token_to_kv_pool", type(part).__name__, "dsa" if isinstance(part, DSATokenToKVPool) else nearest)
        if (layout := getattr(part, "kv_cache_layout", "nhd")) not in ("nhd", "hnd"):
            refuse("kv_cache_layout", layout, "aiter")
        if getattr(part, "is_quantized_kv_cache", False):
            refuse("kv_cache_dtype", part.quant_method.name, "flashinfer")
        if part.dtype not in _DTYPES + _EIGHT_BIT:
            refuse("kv_cache_dtype", part.dtype, "triton")


def check_layer(layer: Any) -> None:
    """Raises NotImplementedError for a RadixAttention with what no field of Attune's says."""
    capped = layer.logit_cap and layer.logit_cap > 0
    for field, covered, nearest in (
            ("is_cross_attention", not layer.is_cross_attention, "flashinfer"),
            ("attn_type", layer.attn_type == AttentionType.DECODER, "triton"),
            ("pos_encoding_mode", layer.pos_encoding_mode == "NONE", "flashinfer"),
            ("logit_capping_method", not capped or layer.logit_capping_method == "tanh", "triton"),
            ("use_irope", not layer.use_irope, "fa3"),
            ("xai_temperature_len", layer.xai_temperature_len is None or layer.xai_temperature_len <= 0, "triton")):
        if not covered:
            refuse(field, getattr(layer, field), nearest)


def check_latent_scale(layer: Any, pool: Any) -> None:
    """Raises NotImplementedError for a latent cache of 8 bits with a scale: SGLang's MLATokenToKVPool stores latents as they are.
    Rows of the sparse layers' pool have scales of their own."""
    scale = None if layer.k_scale is None else layer.k_scale_float
    if pool.dtype in _EIGHT_BIT and not pool.dsa_kv_cache_store_fp8 and scale not in (None, 1.0):
        refuse("k_scale", scale, "triton")


def capability_of(device: torch.device) -> Capability | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def check_kernels(impl: Attending, cache: attune.KVCache | None, device: torch.device, trees: bool = False) -> None:
    """Raises NotImplementedError where no kernel takes such a layer's decode step, its prompts, or trees of its drafts."""

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> attune.Spec:
        return spec(shape, dtype, str(device))

    capability = capability_of(device)
    for rows, offsets, masked in ((2, None, False), (64, made(3), False), (64, made(3), True)):
        if masked and not trees:
            continue
        masks = {"mask_bits": made(rows, 1, dtype=torch.uint8), "mask_start": made(2)} if masked else {}
        fields: dict[str, Any] = {**impl.fields, **masks, "cu_seqlens_q": offsets, "sinks": impl.arrays.get("sinks")}
        if cache is not None:
            fields["cache"] = attune.KVCache(cache.k, cache.v, layout=cache.layout, k_scale=cache.k_scale, v_scale=cache.v_scale,
                                             page_table=made(2, 2))
            fields["seqused_kv"] = made(2)
        elif offsets is None:
            continue
        else:
            fields["k"] = made(rows, impl.num_kv_heads, impl.head_size, dtype=impl.dtype)
            fields["v"] = made(rows, impl.num_kv_heads, impl.head_size_v, dtype=impl.dtype)
        reason = why_not(capability, {**query_specs(impl, rows, device), **fields})
        if reason is not None:
            eight_bit = cache is not None and cache.k.dtype in _EIGHT_BIT
            raise NotImplementedError(
                f"attune: no kernel on {named(capability)} takes num_heads={impl.num_heads}, num_kv_heads={impl.num_kv_heads}, "
                f"head_dim={impl.head_size}, v_head_dim={impl.head_size_v}, dtype={impl.dtype}"
                f"{f', kv_cache_dtype={cache.k.dtype}' if eight_bit else ''}"  # type: ignore[union-attr]
                f"{', speculative_eagle_topk > 1' if masked else ''}: {reason}; "
                f"nearest backend of SGLang that takes it: {'flashmla' if eight_bit and 'head_dim_v' in impl.fields else 'triton'}")


def check_sparse_kernels(impl: Attending, cache: attune.KVCache, device: torch.device, topk: int) -> None:
    """Raises NotImplementedError where no kernel takes lists of topk slots of such a cache."""

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> attune.Spec:
        return spec(shape, dtype, str(device))

    capability = capability_of(device)
    for rows in (2, 64):
        call = {**query_specs(impl, rows, device), "cache": cache, "indices": made(rows, topk), "topk_length": made(rows),
                **impl.fields}
        if (reason := why_not(capability, call)) is not None:
            raise NotImplementedError(
                f"attune: no kernel on {named(capability)} takes num_heads={impl.num_heads}, head_dim={impl.head_size}, "
                f"v_head_dim={impl.head_size_v}, dtype={impl.dtype}, kv_cache_dtype={cache.k.dtype}, index_topk={topk}: {reason}; "
                "nearest backend of SGLang that takes it: dsa")
