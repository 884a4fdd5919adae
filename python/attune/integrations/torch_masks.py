# SPDX-License-Identifier: Apache-2.0
"""Masks of torch, bool or floats to be added, as attention takes them: bits, lengths, or a bias for each position.

A mask here is [batch or 1, heads or 1, rows or 1, keys], and its rows are the queries. What is made of a mask is kept with it as long
as it does not change: the layers of a step share one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import attune

from . import torch_backward


def recorded(mask: torch.Tensor) -> bool:
    """Whether what is done with the mask is recorded, for other masks too: its values say nothing now."""
    return torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def _kept(mask: torch.Tensor, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    if recorded(mask) or mask.is_inference():  # tensors of inference mode do not tell of changes
        return make()
    state, made = getattr(mask, "_attune_made", (None, None))
    if state != mask._version or made is None:
        made = {}
        mask._attune_made = (mask._version, made)
    if key not in made:
        made[key] = make()
    return made[key]


def hiding(mask: torch.Tensor, rows: int, keys: int, batch: int, by_lengths: bool = True) -> dict[str, torch.Tensor]:
    """The field of attention that hides what a bool mask does: lengths, where they may and can say it, or bits."""
    used = lengths(mask, keys, batch) if by_lengths else None
    return {"mask_bits": bits(mask, rows, keys, batch)} if used is None else {"seqused_kv": used}


def bits(mask: torch.Tensor, rows: int, keys: int, batch: int) -> torch.Tensor:
    """bool, at least `keys` wide -> uint8 [batch * rows, bytes] or [batch * rows, heads, bytes]."""
    return _kept(mask, ("bits", rows, keys, batch), lambda: _pack(mask[..., :keys], rows, batch))


def _pack(mask: torch.Tensor, rows: int, batch: int) -> torch.Tensor:
    for axis in range(3):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    # Eight bools are one int64; the product has the one of byte i at bit 56 + i, and nothing else there.
    eights = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).clone(memory_format=torch.contiguous_format).view(torch.int64)
    packed = ((eights * 0x0102040810204080) >> 56).to(torch.uint8)
    packed = packed.expand(batch, -1, rows, -1).transpose(1, 2).flatten(0, 1)  # [batch * rows, heads or 1, bytes]
    return packed.squeeze(1) if packed.shape[1] == 1 else packed


def lengths(mask: torch.Tensor, keys: int, batch: int) -> torch.Tensor | None:
    """int32 [batch] where the mask is bool, the same for all heads and rows, and shows each sequence its first keys; else None.

    Only on the CPU, where looking costs less than computing what is hidden and waits for nobody.
    """
    if mask.is_cuda or recorded(mask) or any(mask.shape[axis] != 1 and mask.stride(axis) != 0 for axis in (1, 2)):
        return None
    return _kept(mask, ("lengths", keys, batch), lambda: _count(mask[:, 0, 0, :keys], batch))


def _count(mask: torch.Tensor, batch: int) -> torch.Tensor | None:
    return mask.sum(-1, dtype=torch.int32).expand(batch).contiguous() if begins(mask) else None


def begins(mask: torch.Tensor) -> bool:
    """Whether each row of bool [batch, keys] is true up to some key and false from there on."""
    return not bool((mask[:, 1:] > mask[:, :-1]).any())


def with_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor,
              fields: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds bias [batch or 1, heads or 1, rows or 1, keys] to fields, for `attend`; returns q, k, v [batch, tokens, heads, d].

    attune's has a row for every position up to the last key.
    """
    rows, keys = q.shape[1], k.shape[1]
    if rows > keys:  # keys that nobody sees come first, so that every query has a position
        front = rows - keys
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, front, 0)) for x in (k, v))
        bias = torch.nn.functional.pad(bias.expand(-1, -1, rows, -1), (front, 0), value=float("-inf"))
        if "mask_bits" in fields:
            fields["mask_start"] = torch.full((q.shape[0],), front, dtype=torch.int32, device=q.device)
    elif bias.shape[2] == 1:
        bias = bias.expand(-1, -1, keys, -1)
    elif rows < keys:
        bias = torch.nn.functional.pad(bias, (0, 0, keys - rows, 0))
    fields["bias"] = bias
    return q, k, v


_MOST_HEADS = 256  # KV heads of a call of rank 4


def _may_look_turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a call of rank 4 might be refused as one in torch's order, which these are known not to be (order.cpp)."""
    if k.shape[2] > _MOST_HEADS:
        return True
    step = q.stride(2)
    return k.stride(2) == step == v.stride(2) and sum(x.shape[1] * x.stride(1) for x in (q, k, v)) <= step


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fields: dict[str, Any]) -> Any:
    """Attention of q, k, v [batch, tokens, heads, d]; bias is [batch or 1, heads or 1, positions, keys]. One call, or one a sequence.

    fields may have out and lse, which are written; the result is that of `attune.attention`.
    """
    if not _one_by_one(q, k, v, fields):
        return attune.attention(q, k, v, **_of_all(fields))
    outs = [attune.attention(q[b], k[b], v[b], **_of_sequence(b, q.shape[1], fields)) for b in range(q.shape[0])]
    if fields.get("out") is not None:
        return (fields["out"], fields["lse"]) if fields.get("lse") is not None else fields["out"]
    return outs[0][None] if len(outs) == 1 else torch.stack(outs)


def gradients(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              fields: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of `attend`."""
    if not _one_by_one(q, k, v, fields):
        return torch_backward.gradients(dout, out, lse, {"q": q, "k": k, "v": v, **_of_all(fields)})
    made = [torch_backward.gradients(dout[b], out[b], lse[b], {"q": q[b], "k": k[b], "v": v[b], **_of_sequence(b, q.shape[1], fields)})
            for b in range(q.shape[0])]
    return tuple(torch.stack(parts) for parts in zip(*made))


def _one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fields: dict[str, Any]) -> bool:
    bias = fields.get("bias")
    return q.shape[0] == 1 or (bias is not None and bias.shape[0] > 1) or (q.shape[0] > 0 and _may_look_turned(q, k, v))


def _of_all(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "bias": fields["bias"][0]} if "bias" in fields else dict(fields)


def _of_sequence(b: int, rows: int, fields: dict[str, Any]) -> dict[str, Any]:
    one = dict(fields)
    for name in ("mask_start", "seqused_kv"):
        if name in one:
            one[name] = one[name][b : b + 1]
    for name in ("out", "lse"):
        if name in one:
            one[name] = one[name][b]
    if "mask_bits" in one:
        one["mask_bits"] = one["mask_bits"][b * rows : (b + 1) * rows]
    if "bias" in one:
        one["bias"] = one["bias"][b if one["bias"].shape[0] > 1 else 0]
    return one
