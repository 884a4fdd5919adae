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
from . import kv_cache as caches

_ANY_BLOCK_SIZE = 16  # where vLLM has not chosen one yet


def device() -> str | None:
    """Where the engine computes; None: on a GPU that this process has not opened, and that a question must not open."""
    if current_platform.device_type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else None


def refusal(*, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None,
            block_size: int | None, sinks: bool = False, alibi: bool = False, **fields: Any) -> str | None:
    """Why no kernel takes such a decode step or such a prompt; None where all is covered, or where `device` is None.

    fields: arguments of attune.attention without arrays. With head_dim_v, V is part of K, as in MLA.
    """
    where = device()
    if where is None:
        return None
    asked = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size, "dtype": dtype,
             "kv_cache_dtype": kv_cache_dtype, "block_size": block_size}
    kv_cache_dtype = kv_cache_dtype or "auto"

    def spec(*shape: int, dtype: torch.dtype = torch.int32) -> attune.Spec:
        return _plans.spec(shape, dtype, where)

    stored = dtype if kv_cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype]
    block_size = block_size or _ANY_BLOCK_SIZE
    if "head_dim_v" in fields:
        cache = caches.latent_view(torch.empty(2, block_size, head_size, dtype=stored, device=where))
    else:
        content = caches.content_bytes(kv_cache_dtype, head_size, head_size) or 2 * head_size
        blocks = torch.empty(2, num_kv_heads, block_size, content, dtype=stored, device=where)
        one = torch.ones((), dtype=torch.float32, device=where)
        cache = caches.view(blocks, kv_cache_dtype, head_size, SimpleNamespace(_k_scale=one, _v_scale=one))
    cache.page_table = spec(2, 2)
    if sinks:
        fields["sinks"] = spec(num_heads, dtype=dtype)
    if alibi:
        fields["alibi_slopes"] = spec(num_heads, dtype=torch.float32)
    for rows, offsets in ((2, None), (64, spec(3))):
        try:
            answer = attune.supported(spec(rows, num_heads, head_size, dtype=dtype), cache=cache, seqused_kv=spec(2),
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
