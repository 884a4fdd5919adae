# SPDX-License-Identifier: Apache-2.0
"""Attune under torch's own names.

    attune.integrations.torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("attune")      # until restore_flash_attention_impl()

From then on attention in torch is Attune's wherever torch takes flash attention: scaled_dot_product_attention and
torch.nn.attention.varlen.varlen_attn, on CUDA and on the CPU, in eager and compiled code, with gradients. What Attune does not cover is
refused by name.

`varlen_attn` and `varlen_attn_out` have the arguments of torch.nn.attention.varlen and need no registration, nor a torch that has that
module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

import attune

from .._errors import InvalidArgument, Unsupported
from . import torch_backward, torch_masks, torch_sdpa

if TYPE_CHECKING:
    from typing import overload


def register(name: str = "attune") -> None:
    """Adds `name` to torch.nn.attention's implementations of flash attention. Raises Unsupported where torch has no such list."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise Unsupported(f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; attune.sdpa and "
                          "attune.integrations.torch_flash.varlen_attn need none") from None
    register_flash_attention_impl(name, register_fn=activate)


class _Handle:
    """What torch keeps while the implementation is active."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library = library

    def remove(self) -> None:
        self.library._destroy()


def activate() -> _Handle:
    """Puts the functions of this module in the place of torch's kernels. torch calls it."""
    library = torch.library.Library("aten", "IMPL")
    for operator, (function, devices) in _KERNELS.items():
        for device in devices:
            library.impl(operator, function, device)
    return _Handle(library)


def _refuse(argument: str, value: Any, allowed: str) -> NoReturn:
    raise Unsupported(f"{argument} is {value}; attune, which is torch's flash attention now, takes {allowed} "
                      "(torch.nn.attention.restore_flash_attention_impl() brings back torch's own)")


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check(query: torch.Tensor, dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p:
        _refuse("dropout_p", dropout_p, "0")
    if return_debug_mask:
        _refuse("return_debug_mask", True, "False")
    if query.dtype not in _DTYPES:
        _refuse("query.dtype", query.dtype, "float32, float16 and bfloat16")


def _like(query: torch.Tensor, head_dim: int) -> torch.Tensor:
    """An output with query's order of axes in memory, as torch makes them."""
    if query.shape[-1] == head_dim:
        return torch.empty_like(query)
    order = sorted(range(query.dim()), key=lambda axis: -query.stride(axis))
    return torch.empty_permuted((*query.shape[:-1], head_dim), order, dtype=query.dtype, device=query.device)


def _unused(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rng_state, unused and debug_attn_mask: there is no dropout."""
    return (torch.zeros(2, dtype=torch.uint64, device=query.device), torch.zeros((), dtype=torch.uint64, device=query.device),
            query.new_empty(0))


def _fields(is_causal: bool, left: int | None, right: int | None, scale: float | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"softmax_scale": scale, "causal": is_causal or right == 0}
    if left is not None and left >= 0:
        fields["window_left"] = left
    if right is not None and right > 0:
        fields["window_right"] = right
    return fields


# -------------------------------------------------------------------------------------------------- tokens before heads


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
             cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
             scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
             seqused_k: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
             block_table: torch.Tensor | None = None, num_splits: int | None = None) -> tuple[torch.Tensor, ...]:
    out = _like(query, value.shape[-1])
    lse = _forward_into(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale,
                        window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k,
                        alibi_slopes=alibi_slopes, block_table=block_table, num_splits=num_splits)
    return (out, lse, *_unused(query))


def _forward_into(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
                  cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
                  scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
                  seqused_k: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
                  block_table: torch.Tensor | None = None, num_splits: int | None = None) -> torch.Tensor:
    """Writes out; returns lse, [batch, heads, tokens] or [heads, total_q]."""
    _check(query, dropout_p, return_debug_mask)
    if alibi_slopes is not None:
        _refuse("alibi_slopes", "given", "None")
    query, scale = torch_sdpa.without_zero_scale(query, scale)
    fields = _fields(is_causal, window_size_left, window_size_right, scale)
    _add_sequences(fields, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table, num_splits)
    lse = query.new_empty((*query.shape[:-3], query.shape[-2], query.shape[-3]), dtype=torch.float32)
    with torch.no_grad():
        attune.attention(query, out=out, lse=lse.transpose(-1, -2), **fields)
    return lse


def _add_sequences(fields: dict[str, Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
                   cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, seqused_k: torch.Tensor | None,
                   block_table: torch.Tensor | None, num_splits: int | None) -> None:
    if cum_seq_q is not None:
        fields.update(cu_seqlens_q=cum_seq_q, max_seqlen_q=int(max_q))
    if block_table is not None:
        if seqused_k is None:
            raise InvalidArgument("seqused_k is None; with block_table it must say how many keys each sequence has")
        fields.update(cache=attune.KVCache(key, value, page_table=block_table), seqused_kv=seqused_k, max_seqlen_kv=int(max_k))
    else:
        if (cum_seq_q is None) != (cum_seq_k is None):
            raise InvalidArgument("cu_seq_k is None; keys without block_table need it" if cum_seq_k is None else "cu_seq_q is None")
        fields.update(k=key, v=value, seqused_kv=seqused_k)
        if cum_seq_k is not None:
            fields.update(cu_seqlens_kv=cum_seq_k, max_seqlen_kv=int(max_k))
    if num_splits == 1:  # torch's word for results that do not depend on the rest of the batch
        fields["batch_invariant"] = True


def _backward(grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
              logsumexp: torch.Tensor, cum_seq_q: torch.Tensor | None, cum_seq_k: torch.Tensor | None, max_q: int, max_k: int,
              dropout_p: float, is_causal: bool, rng_state: torch.Tensor, unused: torch.Tensor, *, scale: float | None = None,
              window_size_left: int | None = None, window_size_right: int | None = None) -> tuple[torch.Tensor, ...]:
    _check(query, dropout_p)
    no_scale = scale == 0
    query, scale = torch_sdpa.without_zero_scale(query, scale)
    fields = _fields(is_causal, window_size_left, window_size_right, scale)
    if cum_seq_q is not None:
        fields.update(max_seqlen_q=int(max_q), max_seqlen_kv=int(max_k))
    fields.update(q=query, k=key, v=value, cu_seqlens_q=cum_seq_q, cu_seqlens_kv=cum_seq_k)
    dq, dk, dv = torch_backward.gradients(grad_out, out, logsumexp.transpose(-1, -2), fields)
    return torch.zeros_like(dq) if no_scale else dq, dk, dv


# -------------------------------------------------------------------------------------------------- heads before tokens


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
          return_debug_mask: bool = False, *, scale: float | None = None) -> tuple[Any, ...]:
    """Of CUDA, where causality is aligned to the last key."""
    _check(query, dropout_p, return_debug_mask)
    used, scale = torch_sdpa.without_zero_scale(query, scale)
    q, k, v = (x.transpose(1, 2) for x in (used, key, value))
    out = _like(query, value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    with torch.no_grad():
        torch_masks.attend(q, k, v, {"softmax_scale": scale, "causal": is_causal, "out": out.transpose(1, 2), "lse": lse.transpose(1, 2)})
    return (out, lse, None, None, query.shape[2], key.shape[2], *_unused(query))


def _sdpa_backward(grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
                   logsumexp: torch.Tensor, cum_seq_q: torch.Tensor | None, cum_seq_k: torch.Tensor | None, max_q: int, max_k: int,
                   dropout_p: float, is_causal: bool, philox_seed: torch.Tensor, philox_offset: torch.Tensor, *,
                   scale: float | None = None) -> tuple[torch.Tensor, ...]:
    _check(query, dropout_p)
    used, used_scale = torch_sdpa.without_zero_scale(query, scale)
    dout, out, lse, q, k, v = (x.transpose(1, 2) for x in (grad_out, out, logsumexp, used, key, value))
    dq, dk, dv = torch_masks.gradients(dout, out, lse, q, k, v, {"causal": is_causal, "softmax_scale": used_scale})
    if scale == 0:
        dq = torch.zeros_like(dq)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _sdpa_of_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
                 attn_mask: torch.Tensor | None = None, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Where causality is aligned to the first key."""
    _check(query, dropout_p)
    out = _like(query, value.shape[-1])
    batch, heads, rows, _ = query.shape
    lse = query.new_empty((batch, rows, heads), dtype=torch.float32)
    with torch.no_grad():
        q, k, v, fields = torch_sdpa.prepared(query, key, value, _mask(attn_mask), is_causal, False, scale)
        torch_masks.attend(q, k, v, {**fields, "out": out.transpose(1, 2), "lse": lse})
    return out, lse.transpose(1, 2)


def _sdpa_of_cpu_backward(grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
                          logsumexp: torch.Tensor, dropout_p: float, is_causal: bool, *, attn_mask: torch.Tensor | None = None,
                          scale: float | None = None) -> tuple[torch.Tensor, ...]:
    _check(query, dropout_p)
    q, k, v, fields = torch_sdpa.prepared(query, key, value, _mask(attn_mask), is_causal, False, scale)
    dout, out, lse = (x.transpose(1, 2) for x in (grad_out, out, logsumexp))
    dq, dk, dv = torch_masks.gradients(dout, out, lse, q, k, v, fields)
    if scale == 0:
        dq = torch.zeros_like(dq)
    keys, used = key.shape[2], k.shape[1]
    if used > keys:  # there were keys in front
        dk, dv = dk[:, used - keys :], dv[:, used - keys :]
    elif used < keys:
        dk, dv = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, keys - used)) for x in (dk, dv))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """bool where a float mask is one: torch hands over 0 and -inf for True and False."""
    if mask is None:
        return None
    mask = mask if mask.dim() == 4 else mask[None, None]
    shown = mask == 0
    return shown if bool((shown | mask.isneginf()).all()) else mask


_BOTH = ("CPU", "CUDA")
_KERNELS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "_flash_attention_forward": (_forward, _BOTH),
    "_flash_attention_forward_no_dropout_inplace": (_forward_into, _BOTH),
    "_flash_attention_backward": (_backward, _BOTH),
    "_scaled_dot_product_flash_attention": (_sdpa, ("CUDA",)),
    "_scaled_dot_product_flash_attention_backward": (_sdpa_backward, ("CUDA",)),
    "_scaled_dot_product_flash_attention_for_cpu": (_sdpa_of_cpu, ("CPU",)),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (_sdpa_of_cpu_backward, ("CPU",)),
}


# ---------------------------------------------------------------------------------------------------------- varlen_attn


if TYPE_CHECKING:
    @overload
    def varlen_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor | None,
                    max_q: int, max_k: int, *, return_aux: None = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
                    enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
                    num_splits: int | None = None) -> torch.Tensor: ...

    @overload
    def varlen_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor | None,
                    max_q: int, max_k: int, *, return_aux: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
                    enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
                    num_splits: int | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def varlen_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor | None,
                max_q: int, max_k: int, *, return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
                enable_gqa: bool = False, seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
                num_splits: int | None = None) -> Any:
    """torch.nn.attention.varlen.varlen_attn: ragged sequences, on every device and in every dtype of `attune.attention`.

    Args:
        query: [total_q, num_heads, d]. key, value: [total_k, num_heads_kv, d]; with block_table [pages, page_size, num_heads_kv, d].
        cu_seq_q, cu_seq_k: int32 [batch + 1]. max_q, max_k: most queries and keys of a sequence.
        return_aux: an AuxRequest, or None. window_size: (-1, 0) is causal; the last query is aligned with the last key.
        seqused_k: int32 [batch], keys in use. block_table: int32 [batch, max_pages]. num_splits: 1 makes results independent of the
            rest of the batch; others have no effect.

    Returns:
        [total_q, num_heads, d]; with return_aux.lse also lse [num_heads, total_q], -inf where a row sees nothing.
    """
    fields = _varlen_fields(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa, seqused_k, block_table,
                            num_splits)
    if return_aux is not None and return_aux.lse:
        out, lse = attune.attention(query, return_lse=True, **fields)
        return out, lse.transpose(0, 1)
    return attune.attention(query, **fields)


if TYPE_CHECKING:
    @overload
    def varlen_attn_out(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
                        cu_seq_k: torch.Tensor | None, max_q: int, max_k: int, *, return_aux: None = None, scale: float | None = None,
                        window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: torch.Tensor | None = None,
                        block_table: torch.Tensor | None = None, num_splits: int | None = None) -> torch.Tensor: ...

    @overload
    def varlen_attn_out(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
                        cu_seq_k: torch.Tensor | None, max_q: int, max_k: int, *, return_aux: Any, scale: float | None = None,
                        window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: torch.Tensor | None = None,
                        block_table: torch.Tensor | None = None, num_splits: int | None = None) -> (
                        torch.Tensor | tuple[torch.Tensor, torch.Tensor]): ...


def varlen_attn_out(out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor,
                    cu_seq_k: torch.Tensor | None, max_q: int, max_k: int, *, return_aux: Any = None, scale: float | None = None,
                    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: torch.Tensor | None = None,
                    block_table: torch.Tensor | None = None, num_splits: int | None = None) -> Any:
    """`varlen_attn` into out, without gradients."""
    fields = _varlen_fields(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa, seqused_k, block_table,
                            num_splits)
    if return_aux is not None and return_aux.lse:
        out, lse = attune.attention(query, out=out, return_lse=True, **fields)
        return out, lse.transpose(0, 1)
    return attune.attention(query, out=out, **fields)


def _varlen_fields(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor | None,
                   max_q: int, max_k: int, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
                   seqused_k: torch.Tensor | None, block_table: torch.Tensor | None, num_splits: int | None) -> dict[str, Any]:
    if scale is not None and not scale > 0:
        raise InvalidArgument(f"scale is {scale}; it must be above 0")
    if query.dim() != 3 or key.dim() != (3 if block_table is None else 4):
        raise InvalidArgument(f"query has shape {list(query.shape)} and key {list(key.shape)}; [total_q, num_heads, d] and "
                              f"{'[total_k, num_heads_kv, d]' if block_table is None else '[pages, page_size, num_heads_kv, d]'} "
                              "are expected")
    if not enable_gqa and query.shape[1] != key.shape[-2]:
        raise InvalidArgument(f"query has {query.shape[1]} heads and key {key.shape[-2]}; enable_gqa is False")
    left, right = window_size
    fields = _fields(False, left, right, scale)
    _add_sequences(fields, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, num_splits)
    return fields
