# SPDX-License-Identifier: Apache-2.0
"""`attune.sdpa`: torch's scaled_dot_product_attention by `attune.attention`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from .._errors import InvalidArgument, Unsupported, WrongType, flag
from . import torch_masks

def scaled_dot_product_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any, dropout_p: float, is_causal: bool,
                                 scale: float | None, enable_gqa: bool) -> torch.Tensor:
    if scale is not None and not isinstance(scale, (float, int)) and not hasattr(scale, "__float__"):
        raise WrongType(f"scale is {scale!r}; a float is expected")
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if dropout_p:
        raise Unsupported(f"dropout_p is {dropout_p}; 0 is supported")
    if attn_mask is not None and is_causal:
        raise InvalidArgument("attn_mask is given, and is_causal is True: one of them says what is seen")
    lower_right = False
    if isinstance(attn_mask, CausalBias):
        lower_right, is_causal = attn_mask.variant == CausalVariant.LOWER_RIGHT, attn_mask.variant == CausalVariant.UPPER_LEFT
        attn_mask = None
    _check(q, k, v, attn_mask)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v, attn_mask = (_autocast(x) for x in (q, k, v, attn_mask))
    _check_dtypes(q, k, v, attn_mask)
    rank = max(q.dim(), k.dim(), v.dim())
    q, k, v = (_with_axes(x, 4) for x in (q, k, v))
    q, k, v = _heads(q, k, v, enable_gqa)
    if attn_mask is not None:
        attn_mask = _with_axes(attn_mask, max(rank, 4))
    lead = _broadcast("the leading axes of q, k and v", q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (_flat(x, lead) for x in (q, k, v))
    if attn_mask is not None:
        attn_mask = _mask(attn_mask, lead, (*q.shape[1:3], k.shape[2]))

    out = torch_masks.attend(*prepared(q, k, v, attn_mask, is_causal, lower_right, scale)).transpose(1, 2)
    if rank > 4:
        return out.unflatten(0, lead)
    return out[(0,) * (4 - rank)] if rank < 4 else out


def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, upper_left: bool, lower_right: bool,
             scale: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """What `torch_masks.attend` takes for q, k, v [batch, heads, tokens, d]: keys that nobody sees may have gone, or be new."""
    batch, _, rows, _ = q.shape
    keys = k.shape[2]
    fields: dict[str, Any] = {}
    if lower_right or (upper_left and rows == keys):
        fields["causal"] = True
    elif upper_left and rows < keys:
        fields["causal"] = True
        k, v = k[:, :, :rows], v[:, :, :rows]  # nobody sees later ones
    elif upper_left:
        fields["window_right"] = rows - keys  # attune aligns the last query with the last key
    q, fields["softmax_scale"] = without_zero_scale(q, scale)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None or 0 in (batch, rows, keys):  # where there is nothing no mask has a say
        return q, k, v, fields
    if mask.shape[-1] != keys:
        mask = mask.expand(-1, -1, -1, keys)
    if mask.dtype == torch.bool:
        fields.update(torch_masks.hiding(mask, rows, keys, batch))
    else:
        q, k, v = torch_masks.with_bias(q, k, v, mask, fields)
    return q, k, v, fields


def without_zero_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float | None]:
    """The same scores where scale is 0, which in attune stands for the default."""
    if scale != 0:
        return q, scale
    return (q * 0 if q.element_size() > 1 else torch.zeros_like(q)), None


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("attn_mask", mask)):
        if x is None and name == "attn_mask":
            continue
        if not isinstance(x, torch.Tensor):
            raise WrongType(f"{name} is {type(x)!r}; sdpa takes tensors of torch, attune.attention other arrays, too")
        if x.is_nested:
            raise Unsupported(f"{name} is a nested tensor; attune.attention has cu_seqlens_q for ragged sequences")
        if name != "attn_mask" and x.dim() < 2:
            raise InvalidArgument(f"{name} has shape {list(x.shape)}; [..., heads, seqlen, head_dim] is expected")
        if x.device != q.device:
            raise InvalidArgument(f"{name} is on {x.device}, but q on {q.device}")
    if q.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"q is on {q.device}; tensors on cpu and cuda are supported")
    if k.shape[-1] != q.shape[-1]:
        raise InvalidArgument(f"k has head_dim {k.shape[-1]}, but q {q.shape[-1]}")
    if v.shape[-2] != k.shape[-2]:
        raise InvalidArgument(f"v has {v.shape[-2]} tokens, but k {k.shape[-2]}")


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise InvalidArgument(f"{name} has dtype {x.dtype}, but q {q.dtype}")
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise InvalidArgument(f"attn_mask has dtype {mask.dtype}; torch.bool, torch.float32 and q's are allowed")


def _autocast(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _with_axes(x: torch.Tensor, rank: int) -> torch.Tensor:
    """With axes of 1 in front; x itself where it has as many, for torch_masks keeps what it makes with a mask."""
    return x if x.dim() >= rank else x[(None,) * (rank - x.dim())]


def _broadcast(what: str, *shapes: Any) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise InvalidArgument(f"{what} do not broadcast: {', '.join(str(list(shape)) for shape in shapes)}") from None


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With as many heads of v as of k, and of q a multiple of them."""
    heads, of_k, of_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if heads == of_k == of_v:
        return q, k, v
    if not enable_gqa:
        (most,) = _broadcast("the heads of q, k and v (enable_gqa is False)", (heads,), (of_k,), (of_v,))
        if of_k != of_v or of_k not in (1, most):
            k, v = (x.expand(*x.shape[:-3], most, *x.shape[-2:]) for x in (k, v))
        return q.expand(*q.shape[:-3], most, *q.shape[-2:]), k, v
    if heads == 0 or of_k == 0 or of_v == 0 or heads % of_k or heads % of_v:
        raise InvalidArgument(f"q has {heads} heads, which is no multiple of k's {of_k} and v's {of_v}")
    of_both = math.lcm(of_k, of_v)
    k, v = (x if x.shape[-3] == of_both else x.repeat_interleave(of_both // x.shape[-3], dim=-3) for x in (k, v))
    return q, k, v


def _flat(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """[*lead, heads, tokens, d] -> [batch, heads, tokens, d]."""
    if x.shape[:-3] != lead:
        x = x.expand(*lead, *x.shape[-3:])
    return x if x.dim() == 4 else x.flatten(0, -4)


def _mask(mask: torch.Tensor, lead: torch.Size, shape: tuple[int, ...]) -> torch.Tensor:
    """[batch or 1, heads or 1, rows or 1, keys or 1] of what broadcasts to [*lead, *shape]."""
    if mask.dim() != len(lead) + 3 or any(n not in (1, m) for n, m in zip(mask.shape, (*lead, *shape))):
        raise InvalidArgument(f"attn_mask has shape {list(mask.shape)}, which does not broadcast to {[*lead, *shape]}")
    if mask.dim() == 4:
        return mask
    return mask.flatten(0, -4) if all(n == 1 for n in mask.shape[:-3]) else _flat(mask, lead)
