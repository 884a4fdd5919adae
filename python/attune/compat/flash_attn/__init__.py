# SPDX-License-Identifier: Apache-2.0
"""flash_attn 2, served by Attune: differentiable over dense keys, any head_dim up to the kernel's, any page size.

lse is the natural logarithm, [batch, num_heads, seqlen_q] or [num_heads, total_q], and +inf where a row sees nothing (out is 0).
num_splits and deterministic are accepted: the result is the same, bit for bit, run after run.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

import attune

from ...integrations.torch_sdpa import without_zero_scale
from .._shared import INFINITY, empty_rows_to, lse_heads_first, refuse, suggesting, wants_gradients, window

if TYPE_CHECKING:
    from typing import Literal, overload
    # Overloads that name the flag take other arguments unchecked: they need not be written three times.

__version__ = "2.8.4"


def _score_fields(function: str, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any, softcap: float,
                  alibi_slopes: torch.Tensor | None, heads: int, most: int) -> dict[str, Any]:
    """heads: of q. most: queries or keys of a sequence."""
    if dropout_p:
        refuse(function, "dropout_p", f"is {dropout_p}; dropout is not supported")
    fields: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap or None, **window(window_size)}
    if alibi_slopes is not None:
        if alibi_slopes.shape[-1:] != (heads,):
            raise attune.InvalidArgument(f"{function}: alibi_slopes has shape {list(alibi_slopes.shape)}; q has {heads} heads")
        if causal or fields.get("window_right") == 0:
            fields["alibi_slopes"] = alibi_slopes
        else:
            fields.update(_absolute_alibi(function, alibi_slopes, most))
    return fields


def _absolute_alibi(function: str, slopes: torch.Tensor, most: int) -> dict[str, Any]:
    """-slope * |distance|, as a T5 table with a bucket for each distance: alibi_slopes themselves raise keys that are later."""
    if slopes.dim() == 2 and slopes.shape[0] > 1:
        refuse(function, "alibi_slopes", f"has shape {list(slopes.shape)} without causal; [num_heads] is supported there")
    most = max(most, 1)  # an empty batch has distances, too
    one_direction = slopes.reshape(-1, 1) * -torch.arange(2 * most, dtype=torch.float32, device=slopes.device)
    return {"t5_bias": torch.cat([one_direction, one_direction], dim=1), "t5_bidirectional": True, "t5_max_distance": most + 1}


def attend(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, want_lse: bool, fields: dict[str, Any],
            empty_rows: float | None = INFINITY) -> tuple[torch.Tensor, torch.Tensor | None]:
    """empty_rows: lse of a row that sees nothing; None: as it is."""
    q, fields["softmax_scale"] = without_zero_scale(q, fields["softmax_scale"])
    if not want_lse:
        return attune.attention(q, k, v, **fields), None
    if wants_gradients(q, k, v):  # a differentiable call makes its outputs
        out, lse = attune.attention(q, k, v, return_lse=True, **fields)
        lse = lse.transpose(-1, -2)
        return out, lse if empty_rows is None else lse.masked_fill(lse.isneginf(), empty_rows)
    lse, rows = lse_heads_first(q)
    out, _ = attune.attention(q, k, v, lse=rows, **fields)
    return out, lse if empty_rows is None else empty_rows_to(empty_rows, lse)


if TYPE_CHECKING:
    @overload
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                        softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                        softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                        return_attn_probs: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_attn_probs: Literal[True],
                        **options: Any) -> tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_attn_probs: bool,
                        **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]: ...


@suggesting  # type: ignore[misc]
def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    """q [batch, seqlen_q, num_heads, d], k and v [batch, seqlen_kv, num_heads_kv, d]; causal is aligned to the last key.

    Returns out, or (out, lse, None) with return_attn_probs: the probabilities are not kept.
    """
    fields = _score_fields("flash_attn_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           q.shape[-2], max(q.shape[1], k.shape[1]))
    out, lse = attend(q, k, v, return_attn_probs, fields)
    return (out, lse, None) if return_attn_probs else out


if TYPE_CHECKING:
    @overload
    def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, return_attn_probs: Literal[True],
                                 **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, return_attn_probs: bool,
                                 **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor: ...


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """kv: [batch, seqlen_kv, 2, num_heads_kv, d]; other arguments as of flash_attn_func."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *args, **kwargs)


if TYPE_CHECKING:
    @overload
    def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, return_attn_probs: Literal[True],
                                  **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, return_attn_probs: bool,
                                  **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor: ...


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """qkv: [batch, seqlen, 3, num_heads, d]; other arguments as of flash_attn_func."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **kwargs)


if TYPE_CHECKING:
    @overload
    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                               cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                               softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                               softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                               return_attn_probs: Literal[False] = False, block_table: torch.Tensor | None = None) -> torch.Tensor: ...

    @overload
    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_attn_probs: Literal[True],
                               **options: Any) -> tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_attn_probs: bool,
                               **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]: ...


@suggesting  # type: ignore[misc]
def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                           softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: torch.Tensor | None = None) -> Any:
    """Ragged q [total_q, num_heads, d], k and v [total_k, num_heads_kv, d], or pages with block_table int32 [batch, max_pages].

    Returns out, or (out, lse [num_heads, total_q], None) with return_attn_probs.
    """
    fields = _score_fields("flash_attn_varlen_func", dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           q.shape[-2], max(int(max_seqlen_q), int(max_seqlen_k)))
    fields.update(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=int(max_seqlen_q))
    if block_table is None:
        fields.update(cu_seqlens_kv=cu_seqlens_k, max_seqlen_kv=int(max_seqlen_k))
        out, lse = attend(q, k, v, return_attn_probs, fields)
    else:
        fields.update(cache=attune.KVCache(k, v, page_table=block_table), seqused_kv=cu_seqlens_k.diff())
        out, lse = attend(q, None, None, return_attn_probs, fields)
    return (out, lse, None) if return_attn_probs else out


if TYPE_CHECKING:
    @overload
    def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, return_attn_probs: Literal[True],
                                        **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, return_attn_probs: bool,
                                        **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor: ...


def flash_attn_varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """kv: [total_k, 2, num_heads_kv, d]; other arguments as of flash_attn_varlen_func."""
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *args, **kwargs)


if TYPE_CHECKING:
    @overload
    def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any,
                                         return_attn_probs: Literal[True], **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, return_attn_probs: bool,
                                         **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]: ...

    @overload
    def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any,
                                         **kwargs: Any) -> torch.Tensor: ...


def flash_attn_varlen_qkvpacked_func(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any,
                                     **kwargs: Any) -> Any:
    """qkv: [total, 3, num_heads, d]; other arguments as of flash_attn_varlen_func."""
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


if TYPE_CHECKING:
    @overload
    def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
                                v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
                                rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
                                cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                                block_table: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
                                window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
                                alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
                                return_softmax_lse: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any,
                                return_softmax_lse: Literal[True], **options: Any) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *args: Any, return_softmax_lse: bool,
                                **options: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@suggesting  # type: ignore[misc]
def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
                            v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
                            rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
                            cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                            block_table: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
                            alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Any:
    """Attention over a cache, after writing k and v at positions cache_seqlens.., with rotary embedding of q and k.

    Args:
        q: [batch, seqlen_q, num_heads, d]. k_cache, v_cache: [rows, capacity, num_heads_kv, d], or with block_table
            [pages, page_size, num_heads_kv, d]. k, v: [batch, seqlen_new, num_heads_kv, d].
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]. cache_seqlens: int or int32 [batch], without the new tokens; None: the
            whole cache. cache_batch_idx: int32 [batch], rows of the cache. cache_leftpad: int32 [batch], slots in front of each
            sequence that hold none of its keys; cache_seqlens counts them, and rotary positions do, too.

    Returns:
        out, or (out, lse [batch, num_heads, seqlen_q]) with return_softmax_lse.
    """
    cache = attune.KVCache(k_cache, v_cache, page_table=block_table, batch_index=cache_batch_idx)
    fields = _score_fields("flash_attn_with_kvcache", 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           q.shape[-2], q.shape[1] + capacity(cache))
    out, lse = attend_to_cache(q, k, v, cache, cache_seqlens, cache_leftpad, rotary_cos, rotary_sin, rotary_interleaved, window_size,
                               return_softmax_lse, fields)
    return (out, lse) if return_softmax_lse else out


def capacity(cache: attune.KVCache) -> int:
    """Most tokens of a sequence in a cache."""
    k: Any = cache.k
    table: Any = cache.page_table
    return k.shape[1] * (1 if table is None else table.shape[1])


def attend_to_cache(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, cache: attune.KVCache,
                    cache_seqlens: int | torch.Tensor | None, cache_leftpad: torch.Tensor | None, rotary_cos: torch.Tensor | None,
                    rotary_sin: torch.Tensor | None, rotary_interleaved: bool, window_size: Any, want_lse: bool,
                    fields: dict[str, Any], rope_offset: int = 0,
                    empty_rows: float | None = INFINITY) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What both versions' flash_attn_with_kvcache do; k and v are None or [batch, seqlen_new, ...], q is [batch, seqlen_q, ...]."""
    batch, seqlen_q = q.shape[:2]
    if not isinstance(cache_seqlens, torch.Tensor):
        if cache_seqlens is None and k is not None:
            raise ValueError("cache_seqlens is None; it must say where k and v go")
        count = capacity(cache) if cache_seqlens is None else _count(cache_seqlens, cache, k, rotary_cos)
        cache_seqlens = torch.full((batch,), count, dtype=torch.int32, device=q.device)
    fields.update(cache=cache, seqused_kv=cache_seqlens)
    if cache_leftpad is not None:
        fields["mask_bits"] = _from_leftpad(cache_leftpad, capacity(cache), seqlen_q)

    rotary = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    given = [name for name, table in rotary.items() if table is not None]
    if given and k is None:
        raise ValueError(f"{given[0]} is given without k and v")
    if len(given) == 1:
        raise ValueError(f"{'rotary_sin' if given[0] == 'rotary_cos' else 'rotary_cos'} is None, and {given[0]} is given")
    if k is not None and v is None and cache.v is not None:
        raise attune.InvalidArgument("v is None, and k is given: new tokens have both")
    if k is not None:
        prologue = attune.Prologue(append=True)
        if rotary_cos is not None and rotary_sin is not None:
            prologue.rope_cos_sin = _cos_sin(rotary_cos, rotary_sin)
            prologue.rope_interleaved = rotary_interleaved
            prologue.rope_offset = rope_offset
        # Without a mask all queries turn by the position of the first, the keys by their own.
        one_position = (prologue.rope_cos_sin is not None and not fields["causal"] and tuple(window_size) == (-1, -1) and seqlen_q > 1)
        if k.shape[1] == seqlen_q and not one_position:
            fields["prologue"] = prologue
        else:
            q = _append_first(q, k, v, cache, cache_seqlens, prologue, one_position)
            fields["seqused_kv"] = cache_seqlens + k.shape[1]
            k = v = None
    return attend(q, k, v, want_lse, fields, empty_rows)


def _count(cache_seqlens: int, cache: attune.KVCache, k: torch.Tensor | None, rotary_cos: torch.Tensor | None) -> int:
    """Lengths on the device are not looked at; one of the host is."""
    count, new, room = int(cache_seqlens), 0 if k is None else k.shape[1], capacity(cache)
    if not 0 <= count <= room - new:
        why = f": the cache has room for {room} tokens, and {new} are new" if new else ""
        raise attune.InvalidArgument(f"cache_seqlens is {count}; 0..{room - new} is allowed{why}")
    if rotary_cos is not None and rotary_cos.shape[0] < count + new:
        raise attune.InvalidArgument(f"rotary_cos has {rotary_cos.shape[0]} positions; tokens go up to position {count + new - 1}")
    return count


def _from_leftpad(leftpad: torch.Tensor, keys: int, rows: int) -> torch.Tensor:
    """mask_bits [batch * rows, bytes] that hide the keys before leftpad [batch]."""
    first = torch.arange(0, keys, 8, dtype=torch.int32, device=leftpad.device)  # of each byte
    hidden = (leftpad[:, None] - first).clamp(0, 8)
    return ((255 << hidden) & 255).to(torch.uint8)[:, None].expand(-1, rows, -1).flatten(0, 1)


def _append_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, cache: attune.KVCache, cache_seqlens: torch.Tensor,
                  prologue: attune.Prologue, one_position: bool) -> torch.Tensor:
    """Writes the new tokens, where they are not the queries' own; returns q turned."""
    attune.qkv_prepare(k=k, v=v, prologue=prologue, cache=cache, seqused_kv=cache_seqlens)
    if prologue.rope_cos_sin is None:
        return q
    steps = torch.arange(q.shape[1], dtype=torch.int32, device=q.device) * (not one_position)
    turn = attune.Prologue(rope_cos_sin=prologue.rope_cos_sin, rope_interleaved=prologue.rope_interleaved,
                           rope_offset=prologue.rope_offset, positions=(cache_seqlens[:, None] + steps).reshape(-1))
    return attune.qkv_prepare(q, prologue=turn)[0]


_tables: dict[int, tuple[Any, ...]] = {}


def _cos_sin(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """float32 [positions, cosines | sines], made once for a pair of tables that stays as it is."""
    if torch.compiler.is_compiling() or cos.is_inference() or sin.is_inference():  # these do not tell of changes
        return torch.cat([cos, sin], dim=-1).to(torch.float32)
    key = id(cos)
    state = (cos.data_ptr(), cos._version, tuple(cos.shape), sin.data_ptr(), sin._version)
    found = _tables.get(key)
    # The sines may be gone, and others have their place in memory.
    if found is None or found[0] != state or found[3]() is not sin:
        table = torch.cat([cos, sin], dim=-1).to(torch.float32)
        found = _tables[key] = (state, table, weakref.ref(cos, lambda _: _tables.pop(key, None)), weakref.ref(sin))
    return found[1]
