# SPDX-License-Identifier: Apache-2.0
"""Random calls of attention as (arguments, options): memory that must not be read holds NaN, unused table entries are wild."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import attune
from reference import SCALES, scale_shape

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
          "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
WILD = 0x7FFFFF00


def normal(rng, shape, dtype="float32"):
    return rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype])


def poison(shape, dtype):
    """An array that spoils what it touches; integers have no NaN, so they hold the largest code."""
    return np.full(shape, 127, np.int8) if dtype == "int8" else np.full(shape, np.nan, np.float32).astype(DTYPES[dtype])


def codes(rng, shape, dtype):
    return rng.integers(-127, 128, shape).astype(np.int8) if dtype == "int8" else normal(rng, shape, dtype)


def strided(rng, array):
    """The same values with a gap after each row of the last axis but one."""
    if array.ndim < 2 or rng.integers(2):
        return array
    wide = np.zeros((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide[..., : array.shape[-1]]


def make_cache(rng, *, pages, page_size, heads, d, d_v, dtype, layout, scales, slots, paged_from=None, v_of_k=False):
    """A KVCache whose slots [(page, offset)] hold data and everything else poison."""
    x = 4
    shapes = {"nhd": ((pages, page_size, heads, d), (pages, page_size, heads, d_v)),
              "hnd": ((pages, heads, page_size, d), (pages, heads, page_size, d_v)),
              "xpacked": ((pages, heads, d // x, page_size, x), (pages, heads, d_v, page_size))}[layout]
    token_axis = {"nhd": (1, 1), "hnd": (2, 2), "xpacked": (3, 3)}[layout]
    k, v = (poison(shape, dtype) for shape in shapes)
    for page, offset in slots:
        for array, axis in ((k, token_axis[0]), (v, token_axis[1])):
            index = [page] + [slice(None)] * (array.ndim - 1)
            index[axis] = offset
            array[tuple(index)] = codes(rng, array[tuple(index)].shape, dtype)
    shapes = [scale_shape(scales, layout, pages, page_size, heads, x) for x in (d, d_v)]
    k_scale, v_scale = (None if shape is None else rng.uniform(0.005, 0.03 if dtype == "int8" else 2, shape).astype(np.float32)
                        for shape in shapes)
    return attune.KVCache(k, None if v_of_k else v, k_scale=k_scale, v_scale=None if v_of_k else v_scale, layout=layout)


@st.composite
def calls(draw):
    """(q, k, v, fields) of a random call over dense, contiguous, paged or mixed keys."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    source = pick("dense", "contiguous", "paged", "paged", "paged+new", "contiguous+new")
    dtype = pick("float32", "float32", "bfloat16", "float16")
    heads_kv, group = pick(1, 2, 3), pick(1, 2, 4, 5)
    d, d_v = pick((16, 16), (64, 64), (40, 24), (128, 128), (8, 12))
    heads_q, batch = heads_kv * group, pick(1, 2, 3)
    new_tokens = source.endswith("+new")
    fixed = draw(st.booleans()) and source != "dense"
    lengths_q = [pick(1, 3)] * batch if fixed else [pick(0, 1, 1, 2, 5, 17) for _ in range(batch)]
    if fixed:
        lengths_q = [lengths_q[0]] * batch
    past = [pick(0, 1, 7, 16, 33, 70) for _ in range(batch)]
    total = sum(lengths_q)
    fields = {}

    q = strided(rng, normal(rng, (batch, lengths_q[0], heads_q, d) if fixed else (total, heads_q, d), dtype))
    if not fixed:
        fields["cu_seqlens_q"] = np.concatenate([[0], np.cumsum(lengths_q)]).astype(np.int32)
    k = v = None
    if source == "dense":
        lengths_kv = past
        fields["cu_seqlens_kv"] = np.concatenate([[0], np.cumsum(lengths_kv)]).astype(np.int32)
        k, v = (strided(rng, normal(rng, (sum(lengths_kv), heads_kv, x), dtype)) for x in (d, d_v))
        longest = max(lengths_kv)
    else:
        if new_tokens:
            shape = (batch, lengths_q[0]) if fixed else (total,)
            k, v = (strided(rng, normal(rng, (*shape, heads_kv, x), dtype)) for x in (d, d_v))
        cache_dtype = pick(dtype, dtype, "float8_e4m3fn", "float8_e5m2", "int8")
        scales = "none" if cache_dtype == dtype else pick(*SCALES)
        layout = pick("nhd", "hnd", "xpacked") if d % 4 == 0 else pick("nhd", "hnd")
        capacity = max(past[b] + (lengths_q[b] if new_tokens else 0) for b in range(batch)) + 1
        if source.startswith("paged"):
            page_size = pick(1, 16, 5)
            most = -(-capacity // page_size)
            order = rng.permutation(batch * most + 2)
            table = np.full((batch, most + 1), WILD, np.int32)
            slots = []
            for b in range(batch):
                used = -(-(past[b] + (lengths_q[b] if new_tokens else 0)) // page_size)
                table[b, :used] = order[b * most : b * most + used]
                slots += [(int(table[b, t // page_size]), t % page_size) for t in range(past[b])]
            pages = len(order)
        else:
            page_size, pages = capacity, batch + 1
            rows = rng.permutation(pages)[:batch].astype(np.int32)
            slots = [(int(rows[b]), t) for b in range(batch) for t in range(past[b])]
        cache = make_cache(rng, pages=pages, page_size=page_size, heads=heads_kv, d=d, d_v=d_v, dtype=cache_dtype, layout=layout,
                           scales=scales, slots=slots)
        if source.startswith("paged"):
            cache.page_table = table
        else:
            cache.batch_index = rows
        fields["cache"] = cache
        fields["seqused_kv"] = np.array(past, np.int32)
        longest = max(p + (n if new_tokens else 0) for p, n in zip(past, lengths_q))

    fields["causal"] = draw(st.booleans())
    fields["window_left"] = pick(None, None, 0, 5, 40)
    fields["window_right"] = pick(None, None, 0, 3)
    if draw(st.integers(0, 3)) == 0:
        fields["mask_bits"] = rng.integers(0, 256, (total, heads_q, 3) if draw(st.booleans()) else (total, 3)).astype(np.uint8)
        fields["mask_start"] = rng.integers(0, 9, batch).astype(np.int32)
    if draw(st.integers(0, 3)) == 0:
        fields["bidirectional_ranges"] = np.sort(rng.integers(0, longest + 2, (batch, 2, 2)), axis=-1).astype(np.int32)
    if draw(st.integers(0, 3)) == 0:
        fields["finished"] = rng.integers(0, 2, batch).astype(bool)
        fields["zero_finished"] = draw(st.booleans())
    fields["skip_decode"] = draw(st.integers(0, 7)) == 0
    fields["softcap"] = pick(None, None, 3.0)
    fields["softmax_scale"] = pick(None, 0.3)
    if draw(st.integers(0, 3)) == 0:
        fields["alibi_slopes"] = rng.uniform(-0.1, 0.3, (batch, heads_q) if draw(st.booleans()) else heads_q).astype(np.float32)
        fields["alibi_sqrt"] = draw(st.booleans())
    if draw(st.integers(0, 4)) == 0:
        fields["t5_bias"] = normal(rng, (heads_q, 8))
        fields["t5_max_distance"], fields["t5_bidirectional"] = 30, draw(st.booleans())
    if draw(st.integers(0, 2)) == 0:
        fields["sinks"] = normal(rng, heads_q)
    if new_tokens and draw(st.booleans()):
        fields["prologue"] = make_prologue(rng, draw, heads_q, heads_kv, d, d_v, batch, total, longest)
    return q, k, v, {name: value for name, value in fields.items() if value is not None}


def make_prologue(rng, draw, heads_q, heads_kv, d, d_v, batch, total, longest):
    p = attune.Prologue(append=draw(st.booleans()))
    if draw(st.booleans()):
        p.q_bias, p.k_bias, p.v_bias = normal(rng, (heads_q, d)), normal(rng, (heads_kv, d)), normal(rng, (heads_kv, d_v))
    if draw(st.booleans()):
        p.ia3_k, p.ia3_v = normal(rng, (2, heads_kv, d)), normal(rng, (2, heads_kv, d_v))
        p.ia3_task = rng.integers(-1, 3, batch).astype(np.int32)
    if draw(st.booleans()):
        p.rope_cos_sin = attune.rope_table(longest + 1, 8)
        p.rope_interleaved, p.rope_offset = draw(st.booleans()), draw(st.sampled_from([0, d - 8]))
        if draw(st.booleans()):
            p.positions = rng.integers(0, longest + 3, total).astype(np.int32)
    if draw(st.booleans()):
        p.logn = attune.logn_table(4, longest + 1)
    return p
