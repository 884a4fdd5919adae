# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache of a layer as an attune.KVCache: views of the same memory, in whatever order it lies.

vLLM gives a layer [blocks, num_kv_heads, block_size, content] with any strides. A row of content is K beside V; with scales per
token and head, K, its fp32 scale, V, its fp32 scale.
"""

from __future__ import annotations

from typing import Any

import torch

import attune

# vLLM's name -> what the elements are; the other dtypes are what the tensor says they are.
EIGHT_BIT = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
}
PER_TOKEN_HEAD = ("fp8_per_token_head", "int8_per_token_head")
DTYPES = ("auto", "float16", "bfloat16", *EIGHT_BIT)
PACKED_BYTES = {"fp8_ds_mla": 656}  # of a token of MLA
SCALE_BYTES = 4


def content_bytes(kv_cache_dtype: str, head_dim_qk: int, head_dim_v: int) -> int | None:
    """Bytes of content of a token and head where it is not only K and V; else None."""
    return head_dim_qk + head_dim_v + 2 * SCALE_BYTES if kv_cache_dtype in PER_TOKEN_HEAD else None


def view(kv_cache: torch.Tensor, kv_cache_dtype: str, head_size: int, layer: Any) -> attune.KVCache:
    """The cache without its page_table. Scales per tensor (or KV head) are those of the layer. It does not keep kv_cache alive."""
    kv_cache = kv_cache.data  # torch's views hold what they are views of
    if kv_cache_dtype not in EIGHT_BIT:
        return attune.KVCache(kv_cache[..., :head_size], kv_cache[..., head_size:], layout="hnd")
    codes = kv_cache.view(EIGHT_BIT[kv_cache_dtype])
    if kv_cache_dtype not in PER_TOKEN_HEAD:
        return attune.KVCache(codes[..., :head_size], codes[..., head_size:], layout="hnd", k_scale=layer._k_scale.reshape(-1),
                              v_scale=layer._v_scale.reshape(-1))
    half = kv_cache.shape[-1] // 2
    return attune.KVCache(codes[..., :head_size], codes[..., half : half + head_size], layout="hnd",
                          k_scale=_scales(kv_cache, head_size), v_scale=_scales(kv_cache, half + head_size))


def latent_view(kv_cache: torch.Tensor, kv_cache_dtype: str, layer: Any) -> attune.KVCache:
    """MLA's [blocks, block_size, latent and rope channels, or bytes of packed ones], without its page_table: one head, whose values
    are part of its keys."""
    kv_cache = kv_cache.data
    if kv_cache_dtype in PACKED_BYTES:
        return attune.KVCache(kv_cache, format="mla_656")
    if kv_cache_dtype in EIGHT_BIT:
        return attune.KVCache(kv_cache.view(EIGHT_BIT[kv_cache_dtype]).unsqueeze(2), k_scale=layer._k_scale.reshape(-1))
    return attune.KVCache(kv_cache.unsqueeze(2))


def _scales(kv_cache: torch.Tensor, at: int) -> torch.Tensor:
    """[blocks, num_kv_heads, block_size], float32: the four bytes from `at` of each row."""
    return kv_cache[..., at : at + SCALE_BYTES].view(torch.float32)[..., 0]
