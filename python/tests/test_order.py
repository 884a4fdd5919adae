# SPDX-License-Identifier: Apache-2.0
"""[batch, seqlen, heads, head_dim] is the order; what can only be torch's [batch, heads, seqlen, head_dim] is refused with the way
out, and what may be either is computed."""

import numpy as np
import pytest

import attune

CACHE = attune.KVCache(np.ones((2, 64, 4, 16), np.float32), np.ones((2, 64, 4, 16), np.float32))
LENGTHS = np.array([9, 5], np.int32)


def ones(*shape):
    return np.ones(shape, np.float32)


def refused(message, *positional, **named):
    for call in attune.attention, attune.Plan, attune.supported, attune.validate:
        with pytest.raises(ValueError, match=message) as raised:
            call(*positional, **named)
        assert isinstance(raised.value, attune.InvalidArgument)
        assert "[batch, seqlen, heads, head_dim]" in str(raised.value) and "swapaxes(1, 2)" in str(raised.value)
        assert str(raised.value).endswith("or call attune.sdpa")


def test_heads_that_fit_only_the_other_way_round():
    refused(r"^q has shape \[2, 8, 7, 16\] and k \[2, 4, 9, 16\].*: 7 heads of q are no multiple of 9 of k", ones(2, 8, 7, 16),
            ones(2, 4, 9, 16), ones(2, 4, 9, 16))
    # A step of decoding, and a prompt, over a cache of 4 heads.
    for seqlen in 1, 7:
        refused(rf"^q has shape \[2, 8, {seqlen}, 16\].*: {seqlen} heads of q are no multiple of 4 of the cache", ones(2, 8, seqlen, 16),
                cache=CACHE, seqused_kv=LENGTHS)
    refused(r"^q has shape \[2, 8, 12, 16\] and k \[2, 4, 12, 16\].*: 12 heads of k are not the 4 of the cache", ones(2, 8, 12, 16),
            ones(2, 4, 12, 16), ones(2, 4, 12, 16), cache=CACHE, seqused_kv=LENGTHS)
    hnd = attune.KVCache(ones(2, 4, 64, 16), ones(2, 4, 64, 16), layout="hnd")
    refused("7 heads of q are no multiple of 4 of the cache", ones(2, 8, 7, 16), cache=hnd, seqused_kv=LENGTHS)


@pytest.mark.parametrize("name, value", [
    ("sinks", ones(8)), ("alibi_slopes", ones(8)), ("alibi_slopes", ones(2, 8)), ("bias", ones(8, 30, 30)),
    ("t5_bias", ones(8, 6)), ("prologue", attune.Prologue(q_bias=ones(8, 16)))])
def test_values_for_each_head_say_which_axis_has_the_heads(name, value):
    x = ones(2, 8, 12, 16)
    where = "prologue.q_bias" if name == "prologue" else name
    refused(rf"^q has shape \[2, 8, 12, 16\].*: {where} is for 8 heads", x, x, x, **{name: value})


def test_more_heads_than_models_have():
    x = ones(1, 8, 300, 4)
    refused(r"^q has shape \[1, 8, 300, 4\] and k \[1, 8, 300, 4\].*: 300 KV heads of 8 tokens", x, x, x)
    # Whoever has them says so by offsets.
    rows = ones(8, 300, 4)
    assert np.allclose(attune.attention(rows, rows, rows, cu_seqlens_q=np.array([0, 8], np.int32)), 1)


def test_causal_queries_that_would_see_nothing():
    q, k = ones(2, 8, 40, 16), ones(2, 2, 40, 16)
    refused(r"^q has shape \[2, 8, 40, 16\] and k \[2, 2, 40, 16\].*: the first 6 of 8 queries would see nothing", q, k, k, causal=True)


def test_views_of_one_projection():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    wide = torch.ones(2, 12, (8 + 2 + 2) * 16)
    parts = [x.unflatten(-1, (-1, 16)) for x in wide.split([8 * 16, 2 * 16, 2 * 16], dim=-1)]
    assert torch.equal(attune.attention(*parts), torch.ones(2, 12, 8, 16))
    refused(r"^q has shape \[2, 8, 12, 16\] and k \[2, 2, 12, 16\].*: one step of axis 2 is a row of q, k and v together",
            *(x.transpose(1, 2) for x in parts))
    wide = torch.ones(2, 12, 3, 4, 16)
    refused("one step of axis 2 is a row of q, k and v together", *(x.transpose(1, 2) for x in wide.unbind(2)))
    refused("one step of axis 2 is a row of q, k and v together", *(x.transpose(1, 2) for x in wide.unbind(2)[::-1]))
    # Caches of torch's order turned the right way, and a head with q, k and v beside each other in each token.
    for kept in torch.ones(3, 2, 4, 12, 16).unbind(0), torch.ones(2, 4, 12, 3, 16).unbind(3):
        assert attune.attention(*(x.transpose(1, 2) for x in kept)).shape == (2, 12, 4, 16)


@pytest.mark.parametrize("q, k, options", [
    ((2, 12, 8, 16), (2, 12, 2, 16), {"causal": True}),  # ordinary
    ((2, 5, 4, 16), (2, 9, 2, 16), {"causal": True}),
    ((2, 8, 7, 16), (2, 4, 7, 16), {}),  # 8 queries, 4 keys, 7 heads: a cross attention
    ((2, 16, 6, 16), (2, 4, 6, 16), {"causal": True}),  # more queries than keys: allowed, if odd
    ((1, 300, 8, 4), (1, 300, 8, 4), {}),
    ((1, 1, 1, 16), (1, 1, 1, 16), {"causal": True}),
    ((2, 8, 12, 16), (2, 8, 12, 16), {"sinks": ones(12)}),
])
def test_what_may_be_meant_is_computed(q, k, options):
    out = attune.attention(ones(*q), ones(*k), ones(*k), **options)
    assert out.shape == q


def test_a_head_count_that_fits_neither_way_has_the_plain_message():
    with pytest.raises(ValueError) as raised:
        attune.attention(ones(2, 7, 5, 16), ones(2, 9, 4, 16), ones(2, 9, 4, 16))
    assert "swapaxes" not in str(raised.value)
