# SPDX-License-Identifier: Apache-2.0
"""qkv_prepare, merge, cache operations and tables."""

import math

import ml_dtypes
import numpy as np
import pytest

import attune
import reference
from cases import normal
from compare import assert_close


@pytest.mark.parametrize("interleaved", [False, True])
def test_qkv_prepare(api, interleaved):
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (5, heads, 16)) for heads in (4, 2, 2))
    p = attune.Prologue(q_bias=normal(rng, (4, 16)), k_bias=normal(rng, (2, 16)), v_bias=normal(rng, (2, 16)),
                        rope_cos_sin=attune.rope_table(32, 8), rope_interleaved=interleaved, rope_offset=8, append=True)
    cache = attune.KVCache(np.zeros((2, 16, 2, 16), np.float32), np.zeros((2, 16, 2, 16), np.float32))
    cu, past = np.array([0, 3, 5], np.int32), np.array([7, 1], np.int32)
    outs = api.qkv_prepare(q, k, v, prologue=p, cu_seqlens_q=cu, seqused_kv=past, cache=cache)
    for which, given, got in zip("qkv", (q, k, v), outs):
        for token in range(5):
            b = int(token >= 3)
            position = int(past[b]) + token - int(cu[b])
            want = reference.prepare(p, which, reference.f64(given)[token], b, token, position)
            assert_close(got[token], want, 1e-5 * (1 + np.abs(want)), which)
            if which != "q":
                assert np.array_equal(getattr(cache, which)[b, position], got[token])
    same = api.qkv_prepare(q, prologue=attune.Prologue(q_bias=p.q_bias), q_out=q)
    assert same[0] is q and same[1] is None
    with pytest.raises(ValueError, match="out_dtype is None, and k is int8"):
        api.qkv_prepare(k=np.zeros((5, 2, 16), np.int8), prologue=attune.Prologue(qkv_scale=np.ones(3, np.float32)))


@pytest.mark.parametrize("powers", [False, True])
def test_qkv_prepare_appends_rows_of_656_bytes_with_scales_of_both_kinds(api, powers):
    k = normal(np.random.default_rng(0), (5, 1, 576))
    cache = attune.KVCache(np.zeros((1, 16, 656), np.uint8), format="mla_656")
    rope = attune.rope_table(16, 64)
    api.qkv_prepare(k=k, prologue=attune.Prologue(append=True, rope_cos_sin=rope, rope_offset=512, power_of_two_scales=powers),
                    cu_seqlens_q=np.array([0, 5], np.int32), seqused_kv=np.array([3], np.int32), cache=cache)
    scales = np.ascontiguousarray(cache.k[0, 3:8, 512:528]).view(np.float32)
    free = np.abs(k[:, 0, :512]).reshape(5, 4, 128).max(-1) / 448
    want = 2.0 ** np.ceil(np.log2(free)) if powers else free
    assert np.allclose(scales, want, rtol=1e-6)
    assert not cache.k[0, 8:].any()
    with pytest.raises(ValueError, match="prologue.power_of_two_scales is 1, but the cache is plain"):
        api.qkv_prepare(k=k, prologue=attune.Prologue(append=True, power_of_two_scales=True), seqused_kv=np.zeros(1, np.int32),
                        cu_seqlens_q=np.array([0, 5], np.int32), cache=attune.KVCache(np.zeros((1, 16, 1, 576), np.float32)))


def test_merge_of_two_halves_is_the_whole(api):
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, (4, 4, 32)), normal(rng, (40, 2, 32)), normal(rng, (40, 2, 32))
    sinks = normal(rng, 4)
    halves = [attune.attention(q, k[part], v[part], return_lse=True, cu_seqlens_q=np.array([0, 4], np.int32),
                               cu_seqlens_kv=np.array([0, 20], np.int32)) for part in (slice(20), slice(20, 40))]
    out, lse = api.merge(np.stack([h[0] for h in halves]), np.stack([h[1] for h in halves]), sinks=sinks, return_lse=True)
    want = reference.attention(q, k, v, sinks=sinks, cu_seqlens_q=np.array([0, 4]), cu_seqlens_kv=np.array([0, 40]))
    assert_close(out, want.out, 1e-5, "out")
    assert_close(lse, want.lse, 1e-5, "lse")
    partial = np.full((2, 1, 1, 4), np.nan, np.float32)
    empty = api.merge(partial, np.full((2, 1, 1), -np.inf, np.float32))
    assert (empty == 0).all()
    with pytest.raises(ValueError, match="partial_lse"):
        api.merge(np.zeros((2, 3, 1, 4), np.float32), np.zeros((2, 2, 1), np.float32))


@pytest.mark.parametrize("dtype, scale", [("float32", None), ("int8", "token"), ("float8_e4m3fn", "token")])
def test_cache_round_trip(api, dtype, scale):
    rng = np.random.default_rng(2)
    kind = np.dtype(dtype) if dtype != "float8_e4m3fn" else ml_dtypes.float8_e4m3fn
    cache = attune.KVCache(np.zeros((3, 4, 2, 8), kind), np.zeros((3, 4, 2, 8), kind))
    if scale:
        cache.k_scale, cache.v_scale = np.zeros((3, 4, 2), np.float32), np.zeros((3, 4, 2), np.float32)
    k, v = normal(rng, (6, 2, 8)), normal(rng, (6, 2, 8))
    slots = np.array([11, 0, -1, 5, 6, 2], np.int64)
    api.cache_append(cache, k, v, slots=slots)
    got_k, got_v = api.cache_gather(cache, np.full((6, 2, 8), np.nan, np.float32), np.full((6, 2, 8), np.nan, np.float32),
                                       slots=slots)
    bound = {"float32": 0, "int8": 0.6 / 127, "float8_e4m3fn": 2**-4}[dtype]
    for got, given in ((got_k, k), (got_v, v)):
        want = given.astype(np.float64)
        want[2] = 0
        assert_close(got, want, bound * np.abs(want).max(axis=-1, keepdims=True), "row")
    whole_k, whole_v = api.cache_dequantize(cache, np.empty((12, 2, 8), np.float32), np.empty((12, 2, 8), np.float32))
    assert np.array_equal(whole_k[11], got_k[0]) and np.array_equal(whole_v[5], got_v[3])
    api.cache_quantize(cache, whole_k, whole_v)
    assert_close(api.cache_dequantize(cache, np.empty((12, 2, 8), np.float32), np.empty((12, 2, 8), np.float32))[0],
                 whole_k.astype(np.float64), 1e-6, "twice")


def test_append_by_sequence(api):
    cache = attune.KVCache(np.zeros((2, 8, 1, 4), np.float32), np.zeros((2, 8, 1, 4), np.float32))
    k = np.arange(12, dtype=np.float32).reshape(3, 1, 4)
    api.cache_append(cache, k, -k, cu_seqlens=np.array([0, 1, 3], np.int32), seqused_kv=np.array([2, 5], np.int32))
    assert np.array_equal(cache.k[0, 2], k[0]) and np.array_equal(cache.v[1, 5:7], -k[1:])
    with pytest.raises(ValueError, match="slots"):
        api.cache_append(cache, k, -k, slots=np.zeros(3, np.int32))


def test_rope_tables():
    table = attune.rope_table(5, 8, first_position=3, theta=100.0, scale=2.0)
    frequencies = [100.0 ** (-2 * j / 8) / 2 for j in range(4)]
    want = [[f(p * w) for f in (math.cos, math.sin) for w in frequencies] for p in range(3, 8)]
    assert table.dtype == np.float32 and np.abs(table - np.array(want)).max() < 1e-7
    assert attune.rope_frequencies(8, theta=100.0, scale=2.0) == pytest.approx(frequencies, rel=1e-14)
    long = attune.rope_frequencies(64, style="llama3", theta=5e5, scale=8.0, max_position=8192, low_freq_factor=1.0,
                                   high_freq_factor=4.0)
    assert long[0] == 1.0 and long[-1] == pytest.approx(5e5 ** (-62 / 64) / 8)
    with pytest.raises(ValueError, match="style is 'lama'; known are none, linear"):
        attune.rope_table(4, 8, style="lama")
    with pytest.raises(ValueError, match="dim is 7"):
        attune.rope_table(4, 7)
    with pytest.raises(ValueError, match="num_positions is -1"):
        attune.rope_table(-1, 8)


def test_other_tables():
    logn = attune.logn_table(16, 64)
    assert (logn[:17] == 1).all() and logn[63] == pytest.approx(math.log(64) / math.log(16))
    slopes = attune.alibi_slopes(12)
    assert slopes[0] == 2**-1 and slopes[7] == 2**-8 and slopes[8] == pytest.approx(2**-0.5)
    for relative in range(-70, 70):
        for both in (False, True):
            assert attune.t5_bucket(relative, 32, 128, both) == reference.t5_bucket(relative, 32, 128, both)
    assert attune.kv_page_bytes("mla_656", 64) == 64 * 656
    assert attune.kv_page_bytes("mla_584", 64) % 576 == 0
