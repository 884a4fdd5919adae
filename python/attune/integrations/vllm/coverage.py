# SPDX-License-Identifier: Apache-2.0
"""Asks Attune's kernel registry about what vLLM is about to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

import attune

from .. import _plans
from .._coverage import Capability, named, why_not
from .._latent import rope_apart
from . import kv_cache as caches

_ANY_BLOCK_SIZE = 16  # where vLLM has not chosen one yet


def engine_capability() -> Capability | None:
    """Of the GPU that the engine computes on, which is not opened for it; None: it computes on the CPU."""
    return current_platform.get_device_capability() if current_platform.device_type == "cuda" else None


def refusal(capability: Capability | None, *, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype,
            kv_cache_dtype: str | None, block_size: int | None, sinks: bool = False, alibi: bool = False, topk: int | None = None,
            returns_lse: bool = False, out_dtype: torch.dtype | None = None, new_tokens: bool = False,
            **fields: Any) -> str | None:
    """Why no kernel takes such a decode step or such a prompt; None where all is covered.

    new_tokens: the step's own among themselves, without a cache. topk: keys of a list for each token. out_dtype: of 8 bits, with one
    scale; None: as dtype. fields: arguments of attune.attention without arrays. With head_dim_v, V is part of K, as in MLA.
    """
    asked = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": dtype,
             "kv_cache_dtype": kv_cache_dtype, "block_size": block_size}
    kv_cache_dtype = kv_cache_dtype or "auto"

    # On the CPU, whatever device vLLM has made the default while it builds the model: only shapes and strides are looked at.
    def spec(*shape: int, dtype: torch.dtype = torch.int32) -> attune.Spec:
        return _plans.spec(shape, dtype, "cpu")

    def array(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    stored = dtype if kv_cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype]
    block_size = block_size or _ANY_BLOCK_SIZE
    scales = SimpleNamespace(_k_scale=array(1, dtype=torch.float32), _v_scale=array(1, dtype=torch.float32))
    if "head_dim_v" in fields:
        width = caches.PACKED_BYTES.get(kv_cache_dtype, head_size)
        fields["cache"] = caches.latent_view(array(2, block_size, width, dtype=stored), kv_cache_dtype, scales)
    else:
        content = caches.content_bytes(kv_cache_dtype, head_size, head_size) or 2 * head_size
        blocks = array(2, num_kv_heads, block_size, content, dtype=stored)
        fields["cache"] = caches.view(blocks, kv_cache_dtype, head_size, scales)
    apart = rope_apart(head_size, fields.get("head_dim_v", head_size))
    if sinks:
        fields["sinks"] = spec(num_heads, dtype=dtype)
    if alibi:
        fields["alibi_slopes"] = spec(num_heads, dtype=torch.float32)
    for rows, batch in ((2, 2), (64, 2)):
        call = {"q": spec(rows, num_heads, head_size - apart, dtype=dtype), **fields}
        if apart:
            call["q_rope"] = spec(rows, num_heads, apart, dtype=dtype)
        if out_dtype is not None:
            call["out"] = spec(rows, num_heads, head_size, dtype=out_dtype)
            call["out_scale"] = spec(1, dtype=torch.float32)
        if returns_lse:
            call["lse"] = spec(rows, num_heads, dtype=torch.float32)
        if new_tokens:
            dense = spec(rows, num_kv_heads, head_size, dtype=dtype)
            call.update(k=dense, v=dense, cu_seqlens_q=spec(batch + 1), cache=None)
        elif topk is not None:
            call.update(indices=spec(rows, topk), topk_length=spec(rows))
        else:
            fields["cache"].page_table = spec(batch, 2)
            call.update(seqused_kv=spec(batch), cu_seqlens_q=None if rows == batch else spec(batch + 1))
        if (reason := why_not(capability, call)) is not None:
            values = ", ".join(f"{field}={value}" for field, value in asked.items() if value is not None)
            return f"no kernel of Attune on {named(capability)} takes {values}: {reason}"
    return None
