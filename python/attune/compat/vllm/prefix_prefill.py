# SPDX-License-Identifier: Apache-2.0
"""vllm.v1.attention.ops.prefix_prefill, served by Attune."""

from __future__ import annotations

import torch

import attune

from ...integrations.torch_sdpa import without_zero_scale
from .._shared import first_element, int32, refuse, suggesting

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def _interleaved(k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, factor: int,
                 max_seq_len: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages that `table` names, with V as attune has it, and a table of these. No layout of attune's has V in blocks of `factor`
    tokens, so the pages are copied, on the caller's stream."""
    pages, heads, d, page_size = v_cache.shape
    if factor < 0 or page_size % factor:
        raise ValueError(f"interleaved_v_pack_factor is {factor}; it must divide the {page_size} tokens of a page, or be 0")
    if max_seq_len:
        table = table[:, : -(-max_seq_len // page_size)]
    there = (table >= 0) & (table < pages)
    named = torch.where(there, table, 0).flatten().long()
    blocks = v_cache.as_strided((pages, heads, page_size // factor, d, factor), (*v_cache.stride()[:2], d * factor, factor, 1))
    copies = torch.arange(len(named), dtype=torch.int32, device=table.device).view_as(table)
    return k_cache[named], blocks[named].transpose(2, 3).flatten(3), torch.where(there, copies, -1)


@suggesting
@torch.inference_mode()
def context_attention_fwd(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, o: torch.Tensor, kv_cache_dtype: str,
                          k_cache: torch.Tensor, v_cache: torch.Tensor, b_loc: torch.Tensor, b_start_loc: torch.Tensor,
                          b_seq_len: torch.Tensor, max_seq_len: int | None, max_input_len: int, k_scale: torch.Tensor | None,
                          v_scale: torch.Tensor | None, alibi_slopes: torch.Tensor | None = None, sliding_window: int | None = None,
                          sm_scale: float | None = None, skip_decode: bool = False,
                          fp8_out_scale: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
                          is_block_table_ptr: bool = False, interleaved_v_pack_factor: int = 0, causal: bool = True) -> None:
    """Attention of new tokens over their context in an x-packed paged cache and over themselves; writes o.

    Args:
        q, o: [tokens, num_heads, d]; k, v: [tokens, num_heads_kv, d], the new tokens. o may be float8_e4m3fn, with fp8_out_scale.
            k and v None: the cache holds the new tokens too.
        kv_cache_dtype: "fp8", "fp8_e4m3", "fp8_e5m2": the cache holds such codes, times k_scale and v_scale (one element); other
            strings: the cache is of its own dtype.
        k_cache: [pages, num_heads_kv, d / x, page_size, x]; v_cache: [pages, num_heads_kv, d, page_size].
        b_loc: int32 [batch, max_pages]; b_start_loc: int32 [batch + 1], rows of each sequence; b_seq_len: int32 [batch], context
            and new tokens; max_input_len: most new tokens of a sequence.
        sliding_window: keys that a query sees, itself included; None or 0: all. skip_decode: rows of sequences with one new token
            are left as they are.
        interleaved_v_pack_factor: x > 0: v_cache has the memory of [pages, num_heads_kv, page_size / x, d, x]. The pages that b_loc
            names are copied in each call, up to max_seq_len tokens of a sequence if that is given.
        causal: False: new tokens see those after them, too; sliding_window still ends what they see before them.
    """
    function = "context_attention_fwd"
    if is_block_table_ptr:
        refuse(function, "is_block_table_ptr", "is True; tables of addresses are not supported")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None and {'v' if k is None else 'k'} is not; without both the new tokens are "
                         "read from the cache")
    if alibi_slopes is not None and not causal:
        refuse(function, "alibi_slopes", "without causal: distances to later keys are not defined")
    table = int32(b_loc)
    if "fp8" not in kv_cache_dtype and k_cache.dtype == torch.uint8:
        raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}, and the cache is uint8: {', '.join(_FP8)} say what it holds")
    if "fp8" in kv_cache_dtype and kv_cache_dtype not in _FP8:
        refuse(function, "kv_cache_dtype", f"is {kv_cache_dtype!r}; {', '.join(_FP8)} are known")
    if kv_cache_dtype in _FP8:
        for name, array in (("k_cache", k_cache), ("v_cache", v_cache)):
            if array.element_size() != 1:
                raise ValueError(f"{name}.dtype is {array.dtype}; with kv_cache_dtype {kv_cache_dtype!r} it has elements of one byte")
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if interleaved_v_pack_factor:
        k_cache, v_cache, table = _interleaved(k_cache, v_cache, table, interleaved_v_pack_factor, max_seq_len)
    cache = attune.KVCache(k_cache, v_cache, layout="xpacked", page_table=table)
    if kv_cache_dtype in _FP8:
        cache.k, cache.v = k_cache.view(_FP8[kv_cache_dtype]), v_cache.view(_FP8[kv_cache_dtype])
        if k_scale is None or v_scale is None:
            raise attune.WrongType(f"{'k_scale' if k_scale is None else 'v_scale'} is None; kv_cache_dtype {kv_cache_dtype!r} needs a scale")
        cache.k_scale, cache.v_scale = first_element(k_scale, q), first_element(v_scale, q)
    q, sm_scale = without_zero_scale(q, sm_scale)
    starts, lengths = int32(b_start_loc), int32(b_seq_len)
    attune.attention(q, k, v, cache=cache, cu_seqlens_q=starts, seqused_kv=lengths if k is None else lengths - starts.diff(),
                     causal=causal, max_seqlen_q=int(max_input_len), softmax_scale=sm_scale, alibi_slopes=alibi_slopes, sinks=sinks,
                     window_left=sliding_window - 1 if sliding_window and sliding_window > 0 else None,
                     skip_decode=skip_decode, out=o,
                     out_scale=None if fp8_out_scale is None else first_element(fp8_out_scale, q).reciprocal())
