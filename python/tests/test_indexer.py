# SPDX-License-Identifier: Apache-2.0
"""The indexer against numpy: scores, choice, slots, and sparse attention with them."""

import ml_dtypes
import numpy as np
import pytest

import attune
import reference
from cases import normal
from compare import assert_attention, assert_close

PAST = [37, 5, 70]  # keys of each sequence, with those of its queries
ROWS = [2, 1, 4]


def problem(quantised):
    """(arguments, keys of each sequence in float64)."""
    rng = np.random.default_rng(0)
    heads, d, page_size = 4, 16, 8
    table = np.full((3, 10), 0x7FFFFF00, np.int32)
    order = rng.permutation(24)
    for b, length in enumerate(PAST):
        used = -(-length // page_size)
        table[b, :used] = order[8 * b : 8 * b + used] if b < 2 else np.concatenate([order[16:], order[5:8]])[:used]
    k = normal(rng, (24, page_size, 1, d))
    k_scale = None
    if quantised:
        k, k_scale = k.astype(ml_dtypes.float8_e4m3fn), rng.uniform(0.5, 2, (24, page_size, 1)).astype(np.float32)
    cache = attune.KVCache(k, k_scale=k_scale, page_table=table)
    arguments = {"q": normal(rng, (sum(ROWS), heads, d)), "weights": normal(rng, (sum(ROWS), heads)), "cache": cache,
                 "q_scale": rng.uniform(0.5, 2, (sum(ROWS), heads)).astype(np.float32), "causal": True,
                 "cu_seqlens_q": np.concatenate([[0], np.cumsum(ROWS)]).astype(np.int32),
                 "seqused_kv": np.array(PAST, np.int32)}
    keys = [np.stack([reference.cache_row(cache, "k", *reference.locate(cache, b, j), 0) for j in range(length)])
            for b, length in enumerate(PAST)]
    return arguments, keys


def scores_of(arguments, keys):
    """float64 [total_q, 70], -inf where a row sees nothing."""
    want = np.full((sum(ROWS), max(PAST)), -np.inf)
    row = 0
    for b, (n, s) in enumerate(zip(ROWS, PAST)):
        for i in range(n):
            end = s - n + i + 1
            dots = np.maximum(arguments["q"][row].astype(np.float64) @ keys[b][:end].T, 0)
            want[row, :end] = (arguments["weights"][row].astype(np.float64) * arguments["q_scale"][row]) @ dots
            row += 1
    return want


@pytest.mark.parametrize("quantised", [False, True])
def test_topk_scores_and_select_agree_with_numpy(api, quantised):
    arguments, keys = problem(quantised)
    want = scores_of(arguments, keys)
    scores = api.indexer_scores(**arguments, max_seqlen_kv=70)
    assert_close(np.where(np.isinf(scores), -np.inf, scores), want, 1e-4, "scores")

    indices, lengths = api.indexer_topk(**arguments, topk=12)
    positions, _ = api.indexer_topk(**arguments, topk=12, form="positions")
    row = 0
    for b, (n, s) in enumerate(zip(ROWS, PAST)):
        for i in range(n):
            count = min(12, s - n + i + 1)
            chosen = positions[row, :count]
            assert lengths[row] == count and (positions[row, count:] == -1).all() and (np.diff(chosen) > 0).all()
            rest = np.delete(want[row, : s - n + i + 1], chosen)
            assert rest.size == 0 or want[row, chosen].min() >= rest.max() - 1e-5
            places = [reference.locate(arguments["cache"], b, j) for j in chosen]
            assert [page * 8 + offset for page, offset in places] == indices[row, :count].tolist()
            row += 1
    tables = {name: arguments[name] for name in ("cache", "causal", "cu_seqlens_q", "seqused_kv")}
    again, again_lengths = api.indexer_select(scores, topk=12, **tables)
    assert np.array_equal(again, indices) and np.array_equal(again_lengths, lengths)


def test_sparse_attention_takes_the_choice(api):
    arguments, _ = problem(False)
    indices, lengths = api.indexer_topk(**arguments, topk=9)
    rng = np.random.default_rng(1)
    cache = attune.KVCache(normal(rng, (24, 8, 1, 32)))
    q = normal(rng, (sum(ROWS), 4, 32))
    fields = {"cache": cache, "indices": indices, "topk_length": lengths, "head_dim_v": 16}
    out = api.attention(q, **fields)
    assert_attention(out, None, None, reference.attention(q, **fields), "float32")


def test_ranges_given_outputs_and_other_pages(api):
    arguments, _ = problem(False)
    begin, end = np.array([3] * 7, np.int32), np.array([30] * 7, np.int32)
    mine, count = np.zeros((7, 5), np.int32), np.zeros(7, np.int32)
    tables = {"slot_table": np.arange(3 * 5, dtype=np.int32).reshape(3, 5), "slot_page_size": 16, "slot_pages": 15}
    got = api.indexer_topk(**arguments, **tables, key_begin=begin, key_end=end, indices=mine, topk_length=count)
    assert got[0] is mine and got[1] is count
    positions, _ = api.indexer_topk(**arguments, topk=5, key_begin=begin, key_end=end, form="positions")
    sequence = np.repeat(np.arange(3), ROWS)[:, None]
    assert np.array_equal(mine, np.where(positions < 0, -1, (sequence * 5 + positions // 16) * 16 + positions % 16))
    assert positions.max() < 30 and positions[positions >= 0].min() >= 3


def test_what_is_refused():
    arguments, _ = problem(False)
    with pytest.raises(ValueError, match="topk and indices are None"):
        attune.indexer_topk(**arguments)
    with pytest.raises(ValueError, match="max_seqlen_kv and scores are None"):
        attune.indexer_scores(**arguments)
    with pytest.raises(ValueError, match="topk is 3, and indices has 2 columns"):
        attune.indexer_topk(**arguments, topk=3, indices=np.zeros((7, 2), np.int32))
    with pytest.raises(ValueError, match="form is 'pages'; known are slots, positions"):
        attune.indexer_topk(**arguments, topk=3, form="pages")
    read_only = np.zeros((7, 3), np.int32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="indices is read-only"):
        attune.indexer_topk(**arguments, indices=read_only)
    with pytest.raises(attune.Error, match="workspace"):
        attune.indexer_topk(**arguments, topk=3, workspace=np.zeros(1, np.uint8))
