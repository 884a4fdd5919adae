# SPDX-License-Identifier: Apache-2.0
"""torch's own call, in torch's order of axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _attention
from ._errors import WrongType, suggesting
from ._frameworks import is_torch

if TYPE_CHECKING:
    import torch


@suggesting
def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
         is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """What torch.nn.functional.scaled_dot_product_attention computes, in its order of axes: heads before tokens.

    The first query is aligned with the first key: with is_causal, query i sees keys 0..i, whatever their number. For queries that
    are the last tokens pass torch.nn.attention.bias.causal_lower_right(seqlen_q, seqlen_kv), or call `attention`. Strides are
    free; docs/python.md says what is copied. Gradients, torch.compile and devices are those of `attention`; torch.autocast has the
    effect that it has in torch.

    Args:
        q: [batch, num_heads_q, seqlen_q, head_dim_qk]; [num_heads_q, ...] and [seqlen_q, head_dim_qk] are one sequence, more axes in
            front more of them. float32, float16 or bfloat16.
        k: [batch, num_heads_kv, seqlen_kv, head_dim_qk]. v: [batch, num_heads_kv, seqlen_kv, head_dim_v]. Batch and heads that are 1
            are for all.
        attn_mask: what broadcasts to [batch, num_heads_q, seqlen_q, seqlen_kv]: bool, True where a key counts; or of q's dtype or
            float32, added to the scores. A torch.nn.attention.bias.CausalBias, too. Not with is_causal.
        dropout_p: 0 only.
        scale: of the scores; None: 1 / sqrt(head_dim_qk).
        enable_gqa: num_heads_q may be a multiple of num_heads_kv.

    Returns:
        [batch, num_heads_q, seqlen_q, head_dim_v]: a view of tokens before heads, so that out.transpose(1, 2).flatten(2) is free. A
        query that sees nothing has 0.

    Raises:
        InvalidArgument, WrongType, Unsupported: as `attention`; and Unsupported for dropout.
    """
    if _attention.tracer is None and not is_torch(q):  # torch has not been met
        raise WrongType(f"q is {type(q)!r}; sdpa takes tensors of torch, attune.attention other arrays, too")
    from .integrations.torch_sdpa import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
