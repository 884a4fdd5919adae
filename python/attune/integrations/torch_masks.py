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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    """Attention of q, k, v [batch, tokens, heads, d]; bias is [batch or 1, heads or 1, positions, keys]. One call, or one a sequence."""
    batch, rows = q.shape[:2]
    fields = dict(fields)
    bias = fields.pop("bias", None)
    if batch != 1 and (bias is None or bias.shape[0] == 1) and not _may_look_turned(q, k, v):
        return attune.attention(q, k, v, bias=None if bias is None else bias[0], **fields)
    by_sequence = ("mask_bits", "mask_start", "seqused_kv")
    tables: dict[str, Any] = {name: fields.pop(name) for name in by_sequence if name in fields}
    outs = []
    for b in range(batch):
        one = {name: table[b * rows : (b + 1) * rows] if name == "mask_bits" else table[b : b + 1] for name, table in tables.items()}
        if bias is not None:
            one["bias"] = bias[b if bias.shape[0] > 1 else 0]
        outs.append(attune.attention(q[b], k[b], v[b], **one, **fields))
    return outs[0][None] if batch == 1 else torch.stack(outs)
