# SPDX-License-Identifier: Apache-2.0
"""flash_mla with the results of its revision of September 2025: max_logits and lse of sparse prefill are in base 2, and -inf
where a row sees nothing. Everything else is `attune.compat.flash_mla`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..flash_mla import (__all__, __version__, _explicit_metadata, _sparse_fwd, flash_attn_varlen_func,  # noqa: F401
                        flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_mla_with_kvcache)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, ...) -> two int32 tensors."""
    return _explicit_metadata(*args, **kwargs)


def flash_mla_sparse_fwd(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float,
                         d_v: int = 512) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As of 2026-04; max_logits and lse are logarithms in base 2."""
    out, max_logits, lse = _sparse_fwd(q, kv, indices, sm_scale, d_v, None, None)
    return out, max_logits.mul_(math.log2(math.e)), lse.mul_(math.log2(math.e))
