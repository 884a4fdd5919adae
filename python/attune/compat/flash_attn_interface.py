# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's calls (the module flash_attn_interface of its hopper folder), served by Attune: differentiable over dense keys.

lse is the natural logarithm, [batch, num_heads, seqlen_q] or [num_heads, total_q], and -inf where a row sees nothing (out is 0).
num_splits, pack_gqa, sm_margin, deterministic and scheduler_metadata are accepted: the result is the same, bit for bit, run after run.
A call makes its schedule itself, on the device.

Descales are those of float8_e4m3fn inputs and are ignored with others, as there. They are [batch, num_heads_kv], the same for all
sequences: of batch 1, or expanded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import attune

from .._errors import whole
from ..integrations._latent import rope_apart
from ._shared import refuse, suggesting, window
from .flash_attn import attend, attend_to_cache

if TYPE_CHECKING:
    from typing import Literal, overload
    # Overloads that name the flag take other arguments unchecked: they need not be written three times.


if TYPE_CHECKING:
    @overload
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                        qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
                        v_descale: torch.Tensor | None = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                        softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                        sm_margin: int = 0, return_attn_probs: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_attn_probs: Literal[True],
                        **options: Any) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_attn_probs: bool,
                        **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@suggesting  # type: ignore[misc]
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                    qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
                    v_descale: torch.Tensor | None = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
                    sm_margin: int = 0, return_attn_probs: bool = False) -> Any:
    """q [batch, seqlen_q, num_heads, d], k and v [batch, seqlen_kv, num_heads_kv, d and d_v]; qv [batch, seqlen_q, num_heads, d_v] adds
    qv v^T to the scores. causal is aligned to the last key.

    Returns out, or (out, lse) with return_attn_probs.
    """
    fields = _score_fields("flash_attn_func", softmax_scale, causal, window_size, attention_chunk, softcap)
    return _dense("flash_attn_func", q, k, v, qv, (q_descale, k_descale, v_descale), return_attn_probs, fields)


if TYPE_CHECKING:
    @overload
    def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                                  q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
                                  v_descale: torch.Tensor | None = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                                  softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
                                  return_attn_probs: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, return_attn_probs: Literal[True],
                                  **options: Any) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, return_attn_probs: bool,
                                  **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@suggesting  # type: ignore[misc]
def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
                              q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
                              v_descale: torch.Tensor | None = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                              softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0,
                              return_attn_probs: bool = False) -> Any:
    """qkv: [batch, seqlen, 3, num_heads, d], or with num_heads_q [batch, seqlen, num_heads_q + 2 * num_heads_kv, d]: heads of q, of k,
    of v. Read where it lies, and differentiable.

    Returns out, or (out, lse) with return_attn_probs.
    """
    function = "flash_attn_qkvpacked_func"
    fields = _score_fields(function, softmax_scale, causal, window_size, attention_chunk, softcap)
    q, k, v = _unpacked(function, qkv, num_heads_q)
    return _dense(function, q, k, v, None, (q_descale, k_descale, v_descale), return_attn_probs, fields)


if TYPE_CHECKING:
    @overload
    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
                               max_seqlen_q: int, max_seqlen_k: int, seqused_q: torch.Tensor | None = None,
                               seqused_k: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
                               qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
                               k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
                               window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
                               pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
                               return_attn_probs: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_attn_probs: Literal[True],
                               **options: Any) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_attn_probs: bool,
                               **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@suggesting  # type: ignore[misc]
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, seqused_q: torch.Tensor | None = None,
                           seqused_k: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
                           qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
                           k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
                           window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
                           pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
                           return_attn_probs: bool = False) -> Any:
    """The same over ragged sequences: q and qv [total_q, num_heads, d], k and v [total_k, num_heads_kv, d]; seqused_k int32 [batch]."""
    function = "flash_attn_varlen_func"
    if seqused_q is not None:
        refuse(function, "seqused_q", "is given; every query is computed here")
    fields = _score_fields(function, softmax_scale, causal, window_size, attention_chunk, softcap)
    fields.update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=int(max_seqlen_q),
                  max_seqlen_kv=int(max_seqlen_k), seqused_kv=seqused_k)
    return _dense(function, q, k, v, qv, (q_descale, k_descale, v_descale), return_attn_probs, fields)


if TYPE_CHECKING:
    @overload
    def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
                                v: torch.Tensor | None = None, qv: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
                                rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
                                cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                                page_table: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
                                cu_seqlens_k_new: torch.Tensor | None = None, max_seqlen_q: int | None = None,
                                rotary_seqlens: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
                                k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
                                softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                                attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
                                scheduler_metadata: torch.Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None,
                                sm_margin: int = 0, return_softmax_lse: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any,
                                return_softmax_lse: Literal[True], **options: Any) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, return_softmax_lse: bool,
                                **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@suggesting  # type: ignore[misc]
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
                            v: torch.Tensor | None = None, qv: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
                            rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
                            cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                            page_table: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
                            cu_seqlens_k_new: torch.Tensor | None = None, max_seqlen_q: int | None = None,
                            rotary_seqlens: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
                            k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
                            softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                            attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
                            scheduler_metadata: torch.Tensor | None = None, num_splits: int = 0, pack_gqa: bool | None = None,
                            sm_margin: int = 0, return_softmax_lse: bool = False) -> Any:
    """Attention over a cache, after writing k and v at positions cache_seqlens.., with rotary embedding of q and k.

    Args: as attune.compat.flash_attn.flash_attn_with_kvcache, and
        qv: [batch, seqlen_q, num_heads, d_v], adds qv v^T to the scores. v_cache and k_cache must then be columns of one cache
            whose rows hold v, then k (d_v + d in all): MLA's latent and rotary parts.
        cu_seqlens_q: int32 [batch + 1], where q is [total_q, num_heads, d]; without k and v.
        k_descale, v_descale, q_descale: of a cache and queries in float8_e4m3fn.
        scheduler_metadata: of get_scheduler_metadata; refused where it was made for calls of other shapes.

    Returns:
        out, or (out, lse) with return_softmax_lse.
    """
    function = "flash_attn_with_kvcache"
    for name, value in (("cu_seqlens_k_new", cu_seqlens_k_new), ("rotary_seqlens", rotary_seqlens)):
        if value is not None:
            refuse(function, name, "is given; new tokens are one block for each sequence, rotated at their positions")
    if cu_seqlens_q is not None and (k is not None or cache_leftpad is not None or not isinstance(cache_seqlens, torch.Tensor)):
        refuse(function, "cu_seqlens_q", "goes with a tensor of cache_seqlens, without k, v and cache_leftpad")
    if k is not None and torch.float8_e4m3fn in (q.dtype, k.dtype):
        refuse(function, "k", "is given, and q or k is float8_e4m3fn; append such tokens to the cache first")
    if scheduler_metadata is not None:
        _check_metadata(function, scheduler_metadata, q, k_cache, v_cache, page_table, cu_seqlens_q, max_seqlen_q)
    fields = _score_fields(function, softmax_scale, causal, window_size, attention_chunk, softcap)
    rope_offset = 0
    if qv is None:
        cache = attune.KVCache(k_cache, v_cache, page_table=page_table, batch_index=cache_batch_idx)
    else:
        rope_offset = fields["head_dim_v"] = v_cache.shape[-1]
        cache = attune.KVCache(_latent(function, k_cache, v_cache), page_table=page_table, batch_index=cache_batch_idx)
        if k is None and softmax_scale != 0 and _apart(q, qv):
            fields["q_rope"], q = q, qv
        else:
            q = torch.cat([qv, q], dim=-1)
        if k is not None and v is not None:
            k, v = torch.cat([v, k], dim=-1), None
    if k_cache.dtype == torch.float8_e4m3fn:
        _descale_cache(function, q, cache, fields, q_descale, k_descale, v_descale, latent=qv is not None)
    if cu_seqlens_q is None:
        out, lse = attend_to_cache(q, k, v, cache, cache_seqlens, cache_leftpad, rotary_cos, rotary_sin, rotary_interleaved,
                                   window_size, return_softmax_lse, fields, rope_offset, empty_rows=None)
    else:
        fields.update(cache=cache, seqused_kv=cache_seqlens, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
        out, lse = attend(q, None, None, return_softmax_lse, fields, empty_rows=None)
    return (out, lse) if return_softmax_lse else out


class _MetadataShapes(NamedTuple):
    """What calls with a tensor of metadata must be like; the tensor has it as an attribute, its copies do not."""

    batch_size: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    headdim_v: int
    max_seqlen_q: int
    page_size: int | None = None


@suggesting
def get_scheduler_metadata(batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
                           cache_seqlens: torch.Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
                           cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
                           cache_leftpad: torch.Tensor | None = None, page_size: int | None = None, max_seqlen_k_new: int = 0,
                           causal: bool = False, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                           has_softcap: bool = False, num_splits: int = 0, pack_gqa: bool | None = None,
                           sm_margin: int = 0) -> torch.Tensor:
    """What flash_attn_with_kvcache takes as scheduler_metadata: int32 [1 + batch_size] on the device of cache_seqlens. There is no
    schedule in it, for a call makes its own; but calls of another batch, other heads, head dims or pages, or more queries a sequence are
    refused. Copies of it (a slice of a buffer, for one) are accepted by every call.

    Args:
        cache_seqlens: int32 [batch_size]. cu_seqlens_q: int32 [batch_size + 1]. headdim_v: None: as headdim.
        max_seqlen_k, qkv_dtype, cache_leftpad, max_seqlen_k_new, causal, has_softcap, num_splits, pack_gqa, sm_margin: no effect.
    """
    function = "get_scheduler_metadata"
    if cu_seqlens_k_new is not None:
        refuse(function, "cu_seqlens_k_new", "is given; new tokens are one block for each sequence")
    _score_fields(function, None, causal, window_size, attention_chunk, 0.0)
    least = {"batch_size": (batch_size, 0), "num_heads_q": (num_heads_q, 1), "num_heads_kv": (num_heads_kv, 1), "headdim": (headdim, 1),
             "headdim_v": (headdim if headdim_v is None else headdim_v, 1), "max_seqlen_q": (max_seqlen_q, 0)}
    if page_size is not None:
        least["page_size"] = page_size, 1
    shapes = _MetadataShapes(**{name: whole(f"{function}: {name}", *pair, most=2**31 - 1) for name, pair in least.items()})
    if shapes.num_heads_q % shapes.num_heads_kv:
        raise attune.InvalidArgument(f"{function}: num_heads_q is {num_heads_q}; a multiple of num_heads_kv, {num_heads_kv}, is expected")
    counts = [("cache_seqlens", cache_seqlens, shapes.batch_size)]
    if cu_seqlens_q is not None:
        counts.append(("cu_seqlens_q", cu_seqlens_q, shapes.batch_size + 1))
    for name, tensor, count in counts:
        if tuple(tensor.shape) != (count,):
            raise attune.InvalidArgument(f"{function}: {name} has shape {list(tensor.shape)}; [{count}] is expected")
        if tensor.dtype != torch.int32:
            raise attune.InvalidArgument(f"{function}: {name} is {tensor.dtype}; int32 is expected")
    metadata = torch.zeros(1 + shapes.batch_size, dtype=torch.int32, device=cache_seqlens.device)
    metadata.attune_shapes = shapes
    return metadata


def _check_metadata(function: str, metadata: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    page_table: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None) -> None:
    if not isinstance(metadata, torch.Tensor):
        raise TypeError(f"{function}: scheduler_metadata is no tensor")
    if metadata.dtype != torch.int32:
        raise attune.WrongType(f"{function}: scheduler_metadata is {metadata.dtype}; what get_scheduler_metadata returns is int32")
    made: _MetadataShapes | None = getattr(metadata, "attune_shapes", None)
    if made is None:
        return
    here = {"batch_size": len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1, "num_heads_q": q.shape[-2],
            "num_heads_kv": k_cache.shape[-2], "headdim": k_cache.shape[-1], "headdim_v": v_cache.shape[-1]}
    if page_table is not None and made.page_size is not None:
        here["page_size"] = k_cache.shape[1]
    for name, value in here.items():
        if value != getattr(made, name):
            raise attune.InvalidArgument(f"{function}: {name} is {value}; scheduler_metadata was made for {getattr(made, name)}")
    longest = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    if longest is not None and longest > made.max_seqlen_q:
        raise attune.InvalidArgument(f"{function}: max_seqlen_q is {longest}; scheduler_metadata was made for at most {made.max_seqlen_q}")


@suggesting
def flash_attn_combine(out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor | None = None,
                       out_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges results over disjoint sets of keys; a part whose lse is -inf has no say, whatever it holds.

    Args:
        out_partial: [num_splits, batch, seqlen, num_heads, d], or [num_splits, total_q, num_heads, d]; float32, float16 or bfloat16.
        lse_partial: float32, of the same shape without d. Of flash_attn_func's lse it is the transpose: heads come last here.
        out: [batch, seqlen, num_heads, d]; None: made, of out_dtype, or as out_partial.

    Returns:
        out and lse, float32 [batch, seqlen, num_heads].
    """
    function = "flash_attn_combine"
    parts = list(out_partial.shape)
    if len(parts) not in (4, 5):
        raise attune.InvalidArgument(f"{function}: out_partial has shape {parts}; [num_splits, batch, seqlen, num_heads, d] is expected")
    if list(lse_partial.shape) != parts[:-1]:
        raise attune.InvalidArgument(f"{function}: lse_partial has shape {list(lse_partial.shape)}; {parts[:-1]} is expected, that of "
                                     "out_partial without d")
    if out is not None and list(out.shape) != parts[1:]:
        raise attune.InvalidArgument(f"{function}: out has shape {list(out.shape)}; {parts[1:]} is expected")
    if out is not None and out_dtype not in (None, out.dtype):
        raise attune.InvalidArgument(f"{function}: out_dtype is {out_dtype}, and out is {out.dtype}")
    rows = out.flatten(0, -3) if out is not None and out.is_contiguous() else None
    merged, lse = attune.merge(out_partial.flatten(1, -3), lse_partial.flatten(1, -2), out=rows, return_lse=True,
                               out_dtype=out_dtype if out is None else out.dtype)
    if out is None:
        out = merged.view(parts[1:])
    elif rows is None:
        out.copy_(merged.view(parts[1:]))
    return out, lse.view(parts[1:-1])


def _unpacked(function: str, qkv: torch.Tensor, num_heads_q: int | None) -> tuple[torch.Tensor, ...]:
    """Views of q, k and v."""
    shape = list(qkv.shape)
    if len(shape) == 5 and shape[2] == 3:
        if num_heads_q not in (None, shape[3]):
            raise attune.InvalidArgument(f"{function}: num_heads_q is {num_heads_q}, and qkv has {shape[3]} heads of q")
        return qkv.unbind(2)
    if len(shape) != 4:
        raise attune.InvalidArgument(f"{function}: qkv has shape {shape}; [batch, seqlen, 3, num_heads, d] is expected, or with "
                                     "num_heads_q [batch, seqlen, num_heads_q + 2 * num_heads_kv, d]")
    heads = shape[2]
    if num_heads_q is None:
        raise attune.InvalidArgument(f"{function}: num_heads_q is None, and qkv has 4 axes: it must say how many of its {heads} "
                                     "heads are q's")
    of_k, odd = divmod(heads - num_heads_q, 2)
    if odd or of_k < 1 or num_heads_q < 1:
        raise attune.InvalidArgument(f"{function}: num_heads_q is {num_heads_q}, and qkv has {heads} heads: those left are as many of k "
                                     "as of v, at least one")
    return qkv.split([num_heads_q, of_k, of_k], 2)


def _score_fields(function: str, softmax_scale: float | None, causal: bool, window_size: Any, attention_chunk: int,
                  softcap: float) -> dict[str, Any]:
    if attention_chunk:
        refuse(function, "attention_chunk", f"is {attention_chunk}; 0 is supported")
    return {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap or None, **window(window_size)}


def _dense(function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None,
           descales: tuple[torch.Tensor | None, ...], want_lse: bool, fields: dict[str, Any]) -> Any:
    if qv is not None:
        q, k = torch.cat([qv, q], dim=-1), torch.cat([v, k], dim=-1)
    if q.dtype == torch.float8_e4m3fn:
        scales = []
        for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales):
            if descale is not None and any(n > 1 and step for n, step in zip(descale.shape, descale.stride())):
                refuse(function, name, f"has shape {list(descale.shape)}; dense keys take one number, of batch 1 or expanded")
            scales.append(torch.ones(1, device=q.device) if descale is None else descale[(0,) * descale.dim()].reshape(1).float())
        if qv is not None and descales[1] is not descales[2]:
            refuse(function, "qv", "is given with descales of k and v that are two tensors; they share one scale")
        fields.update(prologue=attune.Prologue(qkv_scale=torch.cat(scales)), out_dtype=torch.bfloat16)
    out, lse = attend(q, k, v, want_lse, fields, empty_rows=None)
    return (out, lse) if want_lse else out


def _apart(q: torch.Tensor, qv: torch.Tensor) -> bool:
    """Whether kernels take both as they are (attune.attention's q_rope): 16-bit rows at multiples of 16 bytes."""
    return rope_apart(qv.shape[-1] + q.shape[-1], qv.shape[-1]) > 0 and all(
        x.element_size() == 2 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in x.stride()[:-1])
        for x in (q, qv))


def _latent(function: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """The cache whose first columns are v_cache and whose last are k_cache."""
    d_v, d = v_cache.shape[-1], k_cache.shape[-1]
    if (k_cache.stride() != v_cache.stride() or k_cache.data_ptr() - v_cache.data_ptr() != d_v * v_cache.element_size()
            or k_cache.shape[:-1] != v_cache.shape[:-1] or k_cache.stride(-1) != 1):
        refuse(function, "qv", f"is given, and k_cache and v_cache are no columns of one cache: rows of {d_v + d} that hold v, then k, are "
                               "supported, as kv[..., :d_v] and kv[..., d_v:]")
    return v_cache.as_strided((*v_cache.shape[:-1], d_v + d), v_cache.stride())


def _descale_cache(function: str, q: torch.Tensor, cache: attune.KVCache, fields: dict[str, Any], q_descale: torch.Tensor | None,
                   k_descale: torch.Tensor | None, v_descale: torch.Tensor | None, latent: bool) -> None:
    """Scales for each KV head of a float8 cache. Those of q go with k's: a score has both."""
    rows = [_of_heads(function, name, descale) for name, descale in
            (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale))]
    of_q, of_k, of_v = rows
    if latent and (of_q is not None or k_descale is not v_descale):
        refuse(function, "q_descale" if of_q is not None else "qv", "is given: k and v share one scale in a latent cache")
    if q.dtype == torch.float8_e4m3fn:
        fields.update(prologue=attune.Prologue(qkv_scale=torch.ones(3, device=q.device)), out_dtype=torch.bfloat16)
        if of_q is not None:
            of_k = of_q if of_k is None else of_q * of_k
    cache.k_scale, cache.v_scale = of_k, None if latent else of_v


def _of_heads(function: str, name: str, descale: torch.Tensor | None) -> torch.Tensor | None:
    """[batch, num_heads_kv] -> [num_heads_kv]."""
    if descale is None:
        return None
    if descale.dim() != 2 or (descale.shape[0] > 1 and descale.stride(0) != 0):
        refuse(function, name, f"has shape {list(descale.shape)} and a row for each sequence; one for all is supported, of shape "
                               "[1, num_heads_kv] or expanded")
    return descale[0].to(torch.float32).contiguous()
