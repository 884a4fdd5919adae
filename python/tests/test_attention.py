# SPDX-License-Identifier: Apache-2.0
"""attention against the float64 reference."""

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import attune
import reference
from cases import calls, make_cache, normal
from compare import STORE, assert_attention, assert_close, dtype_name


def run_and_compare(api, q, k, v, fields):
    expected = reference.attention(q, k, v, **fields)
    out, lse, max_logits = api.attention(q, k, v, return_lse=True, return_max_logits=True, **fields)
    assert type(out) is type(q) and out.dtype == q.dtype and out.shape[:-1] == q.shape[:-1]
    assert_attention(out, lse, max_logits, expected, dtype_name(q))
    return out, expected


def test_random_calls(api):
    covered = 0

    @settings(max_examples=250 if api.device == "host" else 120, deadline=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(calls())
    def run(call):
        nonlocal covered
        q, k, v, fields = call
        before = copy.deepcopy(fields.get("cache"))
        expected = reference.attention(q, k, v, **fields)
        try:
            out, lse, max_logits = api.attention(q, k, v, return_lse=True, return_max_logits=True, **fields)
        except pytest.skip.Exception:  # the GPU's kernels do not take every call
            return
        covered += 1
        assert_attention(out, lse, max_logits, expected, dtype_name(q))
        if before is not None:
            check_cache(before, fields["cache"], expected.appended)

    run()
    assert covered >= (200 if api.device == "host" else 40)


def check_cache(before, after, appended):
    """What was appended is there, rounded once; every other byte is as it was."""
    touched = set()
    for sequence, position, key, value in appended:
        place = reference.locate(after, sequence, position)
        if place is None:
            continue
        touched.add(place)
        for head in range(key.shape[0]):
            for which, row in (("k", key), ("v", value)):
                scale = getattr(after, which + "_scale")
                stored = reference.cache_row(after, which, *place, head)
                name = dtype_name(getattr(after, which))
                if scale is None:
                    bound = STORE[name] * np.abs(row[head]) + 1e-6
                elif scale.ndim == 3:
                    bound = np.abs(row[head]).max() * {"int8": 0.6 / 127, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}[name]
                else:
                    continue  # saturates at the caller's scale
                assert_close(stored, row[head], bound, f"appended {which}")
    pages, page_size = reference.cache_shape(after)
    for page in range(pages):
        for slot in range(page_size):
            if (page, slot) in touched:
                continue
            for head in range(after.k.shape[2 if after.layout == "nhd" else 1]):
                for which in "kv":
                    old, new = (reference.cache_row(cache, which, page, slot, head) for cache in (before, after))
                    assert np.array_equal(old, new, equal_nan=True), f"slot {page}, {slot} of {which} was written"


def test_plain_prefill(typed_api):
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, (9, heads, 32), typed_api.dtype) for heads in (4, 2, 2))
    run_and_compare(typed_api, q, k, v, {"causal": True})


def test_sparse_slots_with_two_caches(typed_api):
    rng = np.random.default_rng(2)
    every = [(page, offset) for page in range(6) for offset in range(8)]
    first, second = (make_cache(rng, pages=6, page_size=8, heads=1, d=32, d_v=32, dtype=typed_api.dtype, layout="nhd",
                                scales="none", slots=every) for _ in range(2))
    q = normal(rng, (2, 3, 4, 32), typed_api.dtype)
    fields = {"cache": first, "indices": rng.integers(-2, 60, (2, 3, 20)).astype(np.int32),
              "topk_length": rng.integers(0, 21, 6).astype(np.int32), "extra_cache": second,
              "extra_indices": rng.integers(-1, 48, (2, 3, 5)).astype(np.int32), "sinks": normal(rng, 4)}
    run_and_compare(typed_api, q, None, None, fields)


@pytest.mark.parametrize("format, d", [("mla_656", 576), ("mla_584", 512)])
def test_mla_formats(api, format, d):
    rng = np.random.default_rng(3)
    page_size, pages = 16, 4
    bytes_ = attune.kv_page_bytes(format, page_size)
    k = np.zeros((pages, page_size, 656) if format == "mla_656" else (pages, bytes_), np.uint8)
    cache = attune.KVCache(k, format=format, page_size=page_size)
    rows = normal(rng, (pages * page_size, 1, d))
    api.cache_quantize(cache, rows)
    cache.page_table = np.array([[2, 0], [3, 1]], np.int32)
    q = normal(rng, (2, 5, d), "bfloat16")
    fields = {"cache": cache, "seqused_kv": np.array([20, 31], np.int32), "softmax_scale": 0.05}
    if format == "mla_656":
        fields["head_dim_v"] = 512
    run_and_compare(api, q, None, None, fields)
    stored = np.stack([reference.mla_row(cache, page, slot) for page in range(pages) for slot in range(page_size)])
    assert_close(stored, rows[:, 0].astype(np.float64), np.abs(rows[:, 0]) * 2**-4 + 0.02, "quantised rows")


def test_mla_value_is_part_of_key(typed_api):
    rng = np.random.default_rng(4)
    slots = [(page, offset) for page in range(4) for offset in range(16)]
    cache = make_cache(rng, pages=4, page_size=16, heads=1, d=48, d_v=48, dtype=typed_api.dtype, layout="nhd", scales="none",
                       slots=slots, v_of_k=True)
    cache.page_table = np.array([[1, 3, 0, 2]], np.int32)
    run_and_compare(typed_api, normal(rng, (1, 2, 6, 48), typed_api.dtype), None, None,
                    {"cache": cache, "seqused_kv": np.array([50], np.int32), "head_dim_v": 32, "causal": True})


def test_ring_and_beams(typed_api):
    rng = np.random.default_rng(5)
    slots = [(row, offset) for row in range(4) for offset in range(16)]
    cache = make_cache(rng, pages=4, page_size=16, heads=2, d=16, d_v=16, dtype=typed_api.dtype, layout="hnd", scales="none",
                       slots=slots)
    q = normal(rng, (4, 4, 16), typed_api.dtype)
    beams = {"cache": cache, "seqused_kv": np.array([9, 16, 3, 12], np.int32), "beam_width": 2,
             "cache_indirection": rng.integers(0, 2, (4, 16)).astype(np.int32),
             "beam_prompt_length": np.array([2, 2, 0, 0], np.int32)}
    run_and_compare(typed_api, q, None, None, beams)
    cache.ring_capacity = 16
    run_and_compare(typed_api, q, None, None, {"cache": cache, "seqused_kv": np.array([9, 40, 17, 0], np.int32), "window_left": 12})


def test_biases_of_tables_and_trees(typed_api):
    rng = np.random.default_rng(6)
    q, k, v = (normal(rng, (6, heads, 16), typed_api.dtype) for heads in (4, 2, 2))
    run_and_compare(typed_api, q, k, v, {"bias": normal(rng, (4, 6, 6), "float16"), "causal": True})
    run_and_compare(typed_api, q, k, v, {"bias": normal(rng, (1, 6, 6)), "new_token_bias": normal(rng, (6, 6))})


def test_int8_queries_and_float8_output(api):
    rng = np.random.default_rng(7)
    q, k, v = (rng.integers(-127, 128, (5, heads, 32)).astype(np.int8) for heads in (4, 2, 2))
    fields = {"prologue": attune.Prologue(qkv_scale=np.array([0.02, 0.01, 0.03], np.float32)), "causal": True}
    expected = reference.attention(q, k, v, **fields)
    out = api.attention(q, k, v, out_dtype="float32", **fields)
    assert_attention(out, None, None, expected, "float32")
    scale = np.array([4.0], np.float32)
    small = api.attention(q, k, v, out_dtype="float8_e4m3fn", out_scale=scale, **fields)
    assert_close(small, expected.out * 4, np.abs(expected.out * 4) * 2**-4 + 2**-9, "float8 out")


def test_empty_row_and_rows_of_nobody(typed_api):
    rng = np.random.default_rng(8)
    q, k, v = (normal(rng, (n, 2, 8), typed_api.dtype) for n in (4, 1, 1))
    out, lse = np.full((4, 2, 8), 7, q.dtype), np.full((4, 2), 7, np.float32)
    typed_api.attention(q, k, v, cu_seqlens_q=np.array([0, 3], np.int32), cu_seqlens_kv=np.array([0, 1], np.int32), causal=True,
                        out=out, lse=lse)
    assert (out[:2] == 0).all() and np.isneginf(lse[:2]).all()  # before the first key
    assert (out[3] == 7).all() and (lse[3] == 7).all()


def test_same_bits_every_time(typed_api):
    rng = np.random.default_rng(9)
    q, k, v = (normal(rng, (64, heads, 64), typed_api.dtype) for heads in (8, 2, 2))
    first = typed_api.attention(q, k, v, causal=True)
    assert all(np.array_equal(first, typed_api.attention(q, k, v, causal=True)) for _ in range(10))
