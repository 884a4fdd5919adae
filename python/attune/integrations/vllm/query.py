# SPDX-License-Identifier: Apache-2.0
"""Queries of latent attention: vLLM hands their latent and their rope channels apart."""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops

JOINED = (512, 64)  # latent and rope channels that vLLM's operation joins


def joined(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """q [tokens, num_heads, latent and rope channels], of both parts or as it is. On a GPU by vLLM's own operation where that takes it,
    which is faster than torch.cat."""
    if not isinstance(q, tuple):
        return q
    latent, rope = q
    channels = latent.shape[-1], rope.shape[-1]
    if latent.is_cuda and latent.itemsize == 2 and channels == JOINED and latent.stride(-1) == rope.stride(-1) == 1:
        whole = latent.new_empty(*latent.shape[:-1], sum(channels))
        ops.concat_mla_q(latent, rope, whole)
        return whole
    return torch.cat(q, dim=-1)
