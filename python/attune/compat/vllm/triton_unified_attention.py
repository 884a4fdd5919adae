# SPDX-License-Identifier: Apache-2.0
"""vllm.v1.attention.ops.triton_unified_attention, served by Attune."""

from __future__ import annotations

from typing import Any

import torch

import attune

from ...integrations.torch_sdpa import without_zero_scale
from .._shared import first_element, int32, refuse, window

_EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def unified_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu_seqlens_q: torch.Tensor,
                      max_seqlen_q: int, seqused_k: torch.Tensor, max_seqlen_k: int, softmax_scale: float, causal: bool,
                      window_size: tuple[int, int], block_table: torch.Tensor, softcap: float,
                      q_descale: torch.Tensor | None, k_descale: torch.Tensor | None, v_descale: torch.Tensor | None,
                      seq_threshold_3D: int | None = None, num_par_softmax_segments: int | None = None,  # noqa: N803
                      softmax_segm_output: torch.Tensor | None = None, softmax_segm_max: torch.Tensor | None = None,
                      softmax_segm_expsum: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
                      output_scale: torch.Tensor | None = None, qq_bias: torch.Tensor | None = None,
                      sinks: torch.Tensor | None = None, mm_prefix_range: torch.Tensor | None = None,
                      use_alibi_sqrt: bool = False, kv_quant_mode: Any = 0, k_scale_cache: torch.Tensor | None = None,
                      v_scale_cache: torch.Tensor | None = None, chunk_lookback: int = -1, use_td: bool = False,
                      **others: Any) -> None:
    """Causal attention of ragged queries over a paged cache that holds the new tokens already; writes out.

    Args:
        q, out: [tokens, num_heads, d]; out may be float8_e4m3fn, with output_scale. k, v: [pages, page_size, num_heads_kv, d].
        cu_seqlens_q: int32 [batch + 1]; seqused_k: int32 [batch], keys with the new ones; block_table: int32 [batch, max_pages].
        window_size: (left, _): keys before the query's own; -1: all. softcap: 0: none.
        k_descale, v_descale: one scale (its first element is read) of an 8-bit cache; kv_quant_mode 2 and 3: k_scale_cache and
            v_scale_cache, float32 [pages, page_size, num_heads_kv], instead.
        qq_bias: [n, n], added between the new tokens. mm_prefix_range: int32 [batch, ranges, 2], inclusive: such tokens see each
            other. seq_threshold_3D, num_par_softmax_segments, softmax_segm_*, use_td: no effect.
        others: what other revisions of vLLM take; must be None or False.
    """
    function = "unified_attention"
    for name, value in others.items():
        if value is not None and value is not False:
            refuse(function, name, "is given; it is not known here")
    if out is None:
        raise attune.WrongType(f"{function}: out is None; a tensor of torch is expected, to which the result is written")
    if chunk_lookback >= 0:
        refuse(function, "chunk_lookback", f"is {chunk_lookback}; chunks are not supported")
    for name, number in (("seq_threshold_3D", seq_threshold_3D), ("num_par_softmax_segments", num_par_softmax_segments)):
        if isinstance(number, torch.Tensor):  # before 2026 alibi_slopes and output_scale stood in these places
            raise TypeError(f"{name} is a tensor; an int is expected: pass what follows v_descale by name")
    if isinstance(causal, torch.Tensor):
        refuse(function, "causal", "is a tensor; only causal attention is what this function does")
    if not causal:
        refuse(function, "causal", "is False; only causal attention is what this function does")
    if q_descale is not None:
        refuse(function, "q_descale", "is given; queries are not scaled")
    if q.dtype in _EIGHT_BIT:
        refuse(function, "q", f"is {q.dtype}; 16-bit and 32-bit queries are supported")
    mode = int(getattr(kv_quant_mode, "value", kv_quant_mode) or 0)
    if mode not in (0, 1, 2, 3):
        refuse(function, "kv_quant_mode", f"is {kv_quant_mode}; none, fp8 per tensor, and int8 and fp8 per token and head are supported")
    cache = attune.KVCache(k, v, page_table=int32(block_table))
    if mode in (2, 3):
        if k_scale_cache is None or v_scale_cache is None:
            raise ValueError(f"kv_quant_mode is {kv_quant_mode}; it needs k_scale_cache and v_scale_cache")
        cache.k_scale, cache.v_scale = k_scale_cache, v_scale_cache
    elif k.dtype in _EIGHT_BIT:
        cache.k_scale = None if k_descale is None else first_element(k_descale, q)
        cache.v_scale = None if v_descale is None else first_element(v_descale, q)
    q, scale = without_zero_scale(q, softmax_scale)
    attune.attention(q, cache=cache, cu_seqlens_q=int32(cu_seqlens_q), seqused_kv=int32(seqused_k), causal=True,
                     max_seqlen_q=int(max_seqlen_q), max_seqlen_kv=int(max_seqlen_k), softmax_scale=scale,
                     window_left=window(window_size).get("window_left"), softcap=softcap or None,
                     alibi_slopes=alibi_slopes, alibi_sqrt=use_alibi_sqrt, sinks=sinks, new_token_bias=qq_bias,
                     bidirectional_ranges=int32(mm_prefix_range), out=out,
                     out_scale=None if output_scale is None else first_element(output_scale, q).reciprocal())
