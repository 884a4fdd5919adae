# SPDX-License-Identifier: Apache-2.0
"""Asks Attune's kernel registry about what vLLM is about to do, without data."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

import attune

from .kv_cache import EIGHT_BIT, PER_TOKEN_HEAD

_ANY_BLOCK_SIZE = 16  # where vLLM has not chosen one yet


def device() -> str | None:
    """Where the engine computes; None: on a GPU that this process has not opened, and that a question must not open."""
    if current_platform.device_type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else None


def refusal(*, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None,
            block_size: int | None, sinks: bool = False, alibi: bool = False, **fields: Any) -> str | None:
    """Why no kernel takes such a decode step or such a prompt; None where all is covered, or where `device` is None.

    fields: arguments of attune.attention without arrays.
    """
    where = device()
    if where is None:
        return None
    asked = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": dtype,
             "kv_cache_dtype": kv_cache_dtype, "block_size": block_size}
    name = str(dtype).removeprefix("torch.")
    kv_cache_dtype = kv_cache_dtype or "auto"
    stored = EIGHT_BIT.get(kv_cache_dtype, name if kv_cache_dtype == "auto" else kv_cache_dtype)
    shape = (2, num_kv_heads, block_size or _ANY_BLOCK_SIZE, head_size)

    def spec(*shape: int, dtype: str = "float32") -> attune.Spec:
        return attune.Spec(shape, dtype, where)

    def cached() -> attune.Spec:
        return spec(*shape, dtype=str(stored).removeprefix("torch."))

    cache = attune.KVCache(cached(), cached(), layout="hnd", page_table=spec(2, 2, dtype="int32"))
    if kv_cache_dtype in EIGHT_BIT:
        scales = shape[:3] if kv_cache_dtype in PER_TOKEN_HEAD else (1,)
        cache.k_scale, cache.v_scale = spec(*scales), spec(*scales)
    if sinks:
        fields["sinks"] = spec(num_heads, dtype=name)
    if alibi:
        fields["alibi_slopes"] = spec(num_heads)
    for rows, offsets in ((2, None), (64, spec(3, dtype="int32"))):
        try:
            answer = attune.supported(spec(rows, num_heads, head_size, dtype=name), cache=cache, seqused_kv=spec(2, dtype="int32"),
                                      cu_seqlens_q=offsets, device=where, **fields)
        except attune.Error as error:
            reason = str(error)
        else:
            if answer:
                continue
            reason = answer.reason
        values = ", ".join(f"{field}={value}" for field, value in asked.items() if value is not None)
        return f"no kernel of Attune on {where} takes {values}: {reason}"
    return None
