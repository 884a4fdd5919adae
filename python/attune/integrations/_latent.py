# SPDX-License-Identifier: Apache-2.0
"""Queries of latent attention. Engines compute latent and rope channels apart; the kernels take them so."""

from __future__ import annotations

import torch

LATENT = 512  # the channels beside which kernels of GPUs take rope channels apart (docs/kernels/mla.md)


def rope_apart(head_size: int, head_size_v: int, before: int = 0) -> int:
    """How many channels of such queries go to attune.attention as q_rope; 0: queries are whole. before: channels before those in the
    rows that they come in, as the kernels take rows at multiples of 16 bytes."""
    return head_size - LATENT if head_size > head_size_v == LATENT and before % 8 == 0 else 0


def queries(q: torch.Tensor, q_rope: torch.Tensor | None, apart: int) -> dict[str, torch.Tensor]:
    """The arguments q and q_rope of attune.attention, with so many channels apart. q [tokens, num_heads, channels]: all of them, or
    those beside q_rope. Two parts are copied where none is apart."""
    if q_rope is not None:
        return {"q": q, "q_rope": q_rope} if apart else {"q": torch.cat((q, q_rope), dim=-1)}
    return {"q": q[..., :-apart], "q_rope": q[..., -apart:]} if apart else {"q": q}
