# SPDX-License-Identifier: Apache-2.0
"""flash_mla, served by Attune: dense and sparse MLA decode, sparse prefill, dense varlen prefill.

Both call styles work: `get_mla_metadata()` gives an object that keeps a plan and its schedule (2026-04),
`get_mla_metadata(cache_seqlens, ...)` two tensors (2025-09), which callers may copy around and which change nothing. lse is the natural logarithm; a decode row
that sees nothing has out = 0 and lse = +inf. Any page size, any number of heads and any topk will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import attune

from ...integrations.torch_sdpa import without_zero_scale
from .._shared import INFINITY, empty_rows_to, in_their_words, lse_heads_first, refuse, suggesting, wants_gradients

if TYPE_CHECKING:
    from typing import overload

__version__ = "1.0.0"
__all__ = ["get_mla_metadata", "flash_mla_with_kvcache", "flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func",
           "flash_attn_varlen_kvpacked_func", "flash_mla_sparse_fwd"]


# In messages.
_NAMES = {"cache.page_table": "block_table", "seqused_kv": "cache_seqlens", "cache.k": "k_cache", "extra_cache.k": "extra_k_cache",
          "extra_cache": "extra_k_cache", "extra_indices": "extra_indices_in_kvcache", "sinks": "attn_sink"}
_NAMES_OF_PREFILL = {"k": "kv", "sinks": "attn_sink", "head_dim_v": "d_v"}


class FlashMLASchedMeta:
    """Keeps the plan of the first call, and its schedule for all layers of a step; later calls must be of the same shapes.

    A call schedules anew if its lengths are not those of the call before: another tensor, or one that PyTorch has written to;
    and in a capture into a CUDA graph if the call before was in none. What others write to the same tensor, and what is
    written to one of inference mode, is not seen: a new object is needed then (else the call fails on the CPU, and gives NaN on
    CUDA), as with flash_mla; and for each of several graphs that are captured one right after the other.
    """

    def __init__(self) -> None:
        self.have_initialized = False
        self.plan: attune.Plan | None = None
        self.tile_scheduler_metadata: torch.Tensor | None = None
        self.num_splits: torch.Tensor | None = None
        self._scheduled: tuple[Any, ...] | None = None
        self._lengths: tuple[torch.Tensor | None, ...] = ()  # alive, so that no other tensor gets their memory

    def _run(self, q: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
        if self.plan is None:
            self.plan = attune.Plan(q, **fields)
            self.have_initialized = True
        lengths = tuple(fields.get(name) for name in ("seqused_kv", "topk_length", "extra_topk_length"))
        shapes = tuple(x if x is None else x.shape for x in (q, fields.get("indices"), fields.get("extra_indices")))
        key = (q.is_cuda and torch.cuda.is_current_stream_capturing(), fields.get("causal"), shapes, *map(_contents, lengths))
        if key == self._scheduled:
            out, _ = self.plan.run_scheduled(q=q, **fields)
            return out
        self._scheduled = None
        out, _ = self.plan.run(q=q, **fields)
        self._scheduled, self._lengths = key, lengths
        return out


def _contents(tensor: torch.Tensor | None) -> Any:
    """Changes when the tensor does, as far as PyTorch knows."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), 0 if tensor.is_inference() else tensor._version


if TYPE_CHECKING:
    @overload
    def get_mla_metadata() -> tuple[FlashMLASchedMeta, None]: ...

    @overload
    def get_mla_metadata(cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int, num_heads_q: int | None = None,
                         is_fp8_kvcache: bool = False, topk: int | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
    """(FlashMLASchedMeta, None) without arguments; with those of 2025-09, two int32 tensors: [1, 8] and [batch + 1]."""
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    return _explicit_metadata(*args, **kwargs)


def _explicit_metadata(cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int,
                       num_heads_q: int | None = None, is_fp8_kvcache: bool = False,
                       topk: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    device, batch = cache_seqlens.device, cache_seqlens.shape[0]
    return (torch.zeros((1, 8), dtype=torch.int32, device=device),
            torch.arange(batch + 1, dtype=torch.int32, device=device))


def _mla_cache(k_cache: torch.Tensor, is_fp8: bool, **fields: Any) -> attune.KVCache:
    """[pages, page_size, heads, d], or with is_fp8 [pages, page_size, 1, 656 or 584] bytes."""
    if not is_fp8:
        return attune.KVCache(k_cache, **fields)
    if k_cache.dim() != 4:
        raise ValueError(f"k_cache has {k_cache.dim()} axes; it must have 4: pages, page_size, num_heads_kv, bytes of a token")
    pages, page_size, heads, width = k_cache.shape
    if heads != 1:
        raise ValueError(f"k_cache.shape[2] is {heads}; an fp8 cache has one KV head")
    if width not in (656, 584):
        raise ValueError(f"k_cache.shape[3] is {width}; an fp8 cache has 656 or 584 bytes a token")
    if k_cache.element_size() != 1:
        raise ValueError(f"k_cache.dtype is {k_cache.dtype}; an fp8 cache has elements of one byte")
    data = k_cache.squeeze(2).view(torch.uint8)
    if width == 656:
        return attune.KVCache(data, format="mla_656", layout="bytes", **fields)
    # The rows of a page are not its tokens: 576 bytes of each, then 8 of each.
    size = attune.kv_page_bytes("mla_584", page_size)
    if data.stride(2) != 1 or (page_size > 1 and data.stride(1) != 584) or data.stride(0) < size:
        raise ValueError(f"k_cache.stride() is {k_cache.stride()}; rows of 584 bytes lie side by side, and pages of "
                         f"{page_size} of them at least {size} bytes apart")
    data = data.as_strided((pages, size), (data.stride(0), 1))
    return attune.KVCache(data, format="mla_584", layout="bytes", page_size=page_size, **fields)


@suggesting
def flash_mla_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None,
                           cache_seqlens: torch.Tensor | None, head_dim_v: int, tile_scheduler_metadata: Any,
                           num_splits: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
                           is_fp8_kvcache: bool = False, indices: torch.Tensor | None = None,
                           attn_sink: torch.Tensor | None = None, extra_k_cache: torch.Tensor | None = None,
                           extra_indices_in_kvcache: torch.Tensor | None = None, topk_length: torch.Tensor | None = None,
                           extra_topk_length: torch.Tensor | None = None,
                           enable_batch_invariant: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged MLA cache, dense or, with `indices`, sparse.

    Args:
        q: [batch, seqlen_q, num_heads_q, 576 or 512]. k_cache: [pages, page_size, num_heads_kv, head_dim]; with is_fp8_kvcache
            656 or 584 bytes a token.
        block_table: int32 [batch, max_pages], cache_seqlens: int32 [batch]; both None with indices.
        indices: int32 [batch, seqlen_q, topk], page * page_size + offset; topk_length: int32 [batch].
        attn_sink: float32 [num_heads_q]. extra_k_cache, extra_indices_in_kvcache, extra_topk_length: a second cache.
        enable_batch_invariant: a sequence's bits do not depend on the rest of the batch.

    Returns:
        out [batch, seqlen_q, num_heads_q, head_dim_v], lse float32 [batch, num_heads_q, seqlen_q].
    """
    if q.dim() != 4:
        raise ValueError(f"q has {q.dim()} axes; it must have 4: batch, seqlen_q, num_heads_q, head_dim")
    q, softmax_scale = without_zero_scale(q, softmax_scale)
    lse, lse_rows = lse_heads_first(q)
    fields: dict[str, Any] = {"head_dim_v": head_dim_v, "softmax_scale": softmax_scale, "lse": lse_rows,
                              "batch_invariant": enable_batch_invariant, "out": q.new_empty((*q.shape[:-1], head_dim_v))}
    if indices is not None:
        if causal:
            raise ValueError("causal is True; it must be False with indices")
        if extra_k_cache is None:
            for name, value in (("extra_indices_in_kvcache", extra_indices_in_kvcache), ("extra_topk_length", extra_topk_length)):
                if value is not None:
                    raise ValueError(f"{name} is given without extra_k_cache")
        fields.update(cache=_mla_cache(k_cache, is_fp8_kvcache), indices=indices, sinks=attn_sink, topk_length=topk_length)
        if extra_k_cache is not None:
            fields.update(extra_cache=_mla_cache(extra_k_cache, is_fp8_kvcache), extra_indices=extra_indices_in_kvcache,
                          extra_topk_length=extra_topk_length)
    else:
        for name, value in (("extra_k_cache", extra_k_cache), ("extra_indices_in_kvcache", extra_indices_in_kvcache),
                            ("topk_length", topk_length), ("extra_topk_length", extra_topk_length)):
            if value is not None:
                raise ValueError(f"{name} is given without indices")
        for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if value is None:
                raise ValueError(f"{name} is None; it may be with indices only")
        fields.update(cache=_mla_cache(k_cache, is_fp8_kvcache, page_table=block_table), seqused_kv=cache_seqlens,
                      causal=causal, sinks=attn_sink)

    meta = tile_scheduler_metadata
    if isinstance(meta, FlashMLASchedMeta) and num_splits is not None:
        raise ValueError("num_splits is given; it must be None with a FlashMLASchedMeta")
    try:
        out = meta._run(q, fields) if isinstance(meta, FlashMLASchedMeta) else attune.attention(q, **fields)[0]
    except attune.Error as error:
        raise in_their_words(error, _NAMES) from None
    return out, empty_rows_to(INFINITY, lse)


@suggesting
def flash_mla_sparse_fwd(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512,
                         attn_sink: torch.Tensor | None = None, topk_length: torch.Tensor | None = None,
                         indexer_topk: int = 0) -> tuple[torch.Tensor, ...]:
    """Sparse prefill of one sequence.

    Args:
        q: [seqlen_q, num_heads_q, d]. kv: [seqlen_kv, num_heads_kv, d]. indices: int32 [seqlen_q, num_heads_kv, topk], tokens of
            kv; out of range: ignored. topk_length: int32 [seqlen_q]. attn_sink: float32 [num_heads_q].
        indexer_topk: of the indices, how many the first part has; a second call of attention.

    Returns:
        out [seqlen_q, num_heads_q, d_v], max_logits and lse, float32 [seqlen_q, num_heads_q], natural logarithm. A row that sees
        nothing has out = 0, max_logits = -inf and lse = +inf. With indexer_topk, then the lse over the first part.
    """
    if indexer_topk < 0:
        raise ValueError(f"indexer_topk is {indexer_topk}; it must be 0, or how many of the indices come first")
    out, max_logits, lse = _sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    lse = empty_rows_to(INFINITY, lse)
    if not indexer_topk:
        return out, max_logits, lse
    length = None if topk_length is None else topk_length.clamp(max=indexer_topk)
    first = _sparse_fwd(q, kv, indices[..., :indexer_topk], sm_scale, d_v, None, length)[2]
    return out, max_logits, lse, empty_rows_to(INFINITY, first)


def _sparse_fwd(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int,
                attn_sink: torch.Tensor | None,
                topk_length: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, scale = without_zero_scale(q, sm_scale)
    try:
        out, lse, max_logits = attune.attention(q, kv, indices=indices, softmax_scale=scale, head_dim_v=d_v, sinks=attn_sink,
                                                topk_length=topk_length, return_lse=True, return_max_logits=True)
    except attune.Error as error:
        raise in_their_words(error, _NAMES_OF_PREFILL) from None
    return out, max_logits, lse


@suggesting
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_qo: torch.Tensor,
                           cu_seqlens_kv: torch.Tensor, max_seqlen_qo: int, max_seqlen_kv: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False, deterministic: bool = False,
                           is_varlen: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention over ragged sequences; differentiable in q, k and v, the same bits in every run. is_varlen is not looked at.

    Returns:
        out [total_q, num_heads, head_dim_v], lse float32 [total_q, num_heads] (contiguous along total_q), -inf where a row sees
        nothing.
    """
    if dropout_p:
        refuse("flash_attn_varlen_func", "dropout_p", f"is {dropout_p}; dropout is not supported")
    q, softmax_scale = without_zero_scale(q, softmax_scale)
    # A differentiable call makes its outputs.
    lse: dict[str, Any] = {"return_lse": True} if wants_gradients(q, k, v) else {"lse": lse_heads_first(q)[1]}
    return attune.attention(q, k, v, cu_seqlens_q=cu_seqlens_qo, cu_seqlens_kv=cu_seqlens_kv, max_seqlen_q=max_seqlen_qo,
                            max_seqlen_kv=max_seqlen_kv, softmax_scale=softmax_scale, causal=causal, **lse)


@suggesting
def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, head_dim_qk: int,
                                     dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                                     deterministic: bool = False,
                                     is_varlen: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv: [total, num_heads, 2 * head_dim_qk + head_dim_v]."""
    q, k, v = qkv.split([head_dim_qk, head_dim_qk, qkv.shape[-1] - 2 * head_dim_qk], dim=-1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
                                  deterministic, is_varlen)


@suggesting
def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, cu_seqlens_qo: torch.Tensor, cu_seqlens_kv: torch.Tensor,
                                    max_seqlen_qo: int, max_seqlen_kv: int, head_dim_qk: int, dropout_p: float = 0.0,
                                    softmax_scale: float | None = None, causal: bool = False, deterministic: bool = False,
                                    is_varlen: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """kv: [total_kv, num_heads_kv, head_dim_qk + head_dim_v]."""
    k, v = kv.split([head_dim_qk, kv.shape[-1] - head_dim_qk], dim=-1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale,
                                  causal, deterministic, is_varlen)
