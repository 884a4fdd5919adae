# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence in float64, for the calls of FlashAttention."""

from compare import COMPUTE, dtype_name
from places import Here, exact, torch


def plain(q, k, v, scale=None, causal=False, window=(-1, -1), slopes=None, begin=0):
    """(out, lse) of one sequence, [tokens, heads, d], in float64. Keys before begin are not there."""
    q, k, v = (torch.from_numpy(exact(x)).double() for x in (q, k, v))
    rows, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    place, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
    if slopes is not None:
        scores -= slopes.cpu().double()[:, None, None] * (place - key).abs()
    hidden = key < begin
    if causal:
        hidden = hidden | (key > place)
    if window[0] >= 0:
        hidden = hidden | (key < place - window[0])
    if window[1] >= 0:
        hidden = hidden | (key > place + window[1])
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num()
    return torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1)), lse


def assert_same(got, want, factor=4):
    bound = factor * COMPUTE[dtype_name(torch.empty(0, dtype=Here.dtype))]
    torch.testing.assert_close(got.detach().double().cpu(), want, rtol=bound, atol=bound)
