# SPDX-License-Identifier: Apache-2.0
"""Attention in numpy float64, one row at a time, from docs/semantics.md. It shares nothing with the library or its oracle."""

from __future__ import annotations

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np

import attune


def f64(array):
    """Any array as float64 (a View by its stated dtype)."""
    if isinstance(array, attune.View):
        array = array.array.view(getattr(ml_dtypes, array.dtype))
    with np.errstate(invalid="ignore"):  # NaN of ml_dtypes
        return np.asarray(array).astype(np.float64)


# ------------------------------------------------------------------------------------------------------------ caches


def e8m0(code):
    return math.nan if code == 255 else 2.0 ** (int(code) - 127)


def mla_row(cache, page, slot):
    """One token of a packed MLA page."""
    data = np.ascontiguousarray(np.asarray(cache.k)[page])
    if cache.format == "mla_656":
        row = data[slot]
        scales = row[512:528].copy().view(np.float32).astype(np.float64)
        codes = row[:512].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return np.concatenate([codes * np.repeat(scales, 128), row[528:].copy().view(ml_dtypes.bfloat16).astype(np.float64)])
    row = data[slot * 576 : (slot + 1) * 576]
    scales = np.array([e8m0(code) for code in data[cache.page_size * 576 + slot * 8 :][:7]])
    codes = row[:448].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.concatenate([codes * np.repeat(scales, 64), row[448:].copy().view(ml_dtypes.bfloat16).astype(np.float64)])


SCALES = "tensor", "head", "token"  # what shares a scale


def scale_shape(scales, layout, pages, page_size, heads, dim):
    """The shape of k_scale or v_scale of rows of dim channels; None: there is none."""
    by_token = (pages, page_size, heads) if layout == "nhd" else (pages, heads, page_size)
    return {"tensor": (1,), "head": (heads,), "token": by_token}.get(scales)


def cache_row(cache, which, page, slot, head):
    """Key or value of one token and KV head, dequantised."""
    if cache.format in ("mla_656", "mla_584"):
        return mla_row(cache, page, slot)
    data, scale = (cache.k, cache.k_scale) if which == "k" else (cache.v, cache.v_scale)
    data = f64_lazy(data)
    if cache.layout == "hnd":
        row, place = data[page, head, slot], (page, head, slot)
    elif cache.layout == "xpacked":
        row, place = (data[page, head, :, slot, :].reshape(-1) if which == "k" else data[page, head, :, slot]), (page, head, slot)
    else:
        row, place = data[page, slot, head], (page, slot, head)
    row = row.astype(np.float64)
    if scale is None:
        return row
    scale = np.asarray(scale, np.float64)
    return row * (scale[place] if scale.ndim == 3 else scale.reshape(-1)[head if scale.size > 1 else 0])


def f64_lazy(array):
    """The array itself where numpy can index it: only rows that are used are converted."""
    return array.array.view(getattr(ml_dtypes, array.dtype)) if isinstance(array, attune.View) else np.asarray(array)


def cache_shape(cache):
    """(pages, page_size)."""
    shape = cache.k.shape
    if cache.format == "mla_584":
        return shape[0], cache.page_size
    return shape[0], {"hnd": shape[2:3], "xpacked": shape[3:4]}.get(cache.layout, shape[1:2])[0]


def locate(cache, sequence, token):
    """(page, slot) of a token, or None where no valid page holds it."""
    pages, page_size = cache_shape(cache)
    if cache.ring_capacity:
        token %= cache.ring_capacity
    if cache.page_table is None:
        row = sequence if cache.batch_index is None else int(cache.batch_index[sequence])
        return (row, token) if 0 <= row < pages and token < page_size else None
    page = int(cache.page_table[sequence, token // page_size])
    return (page, token % page_size) if 0 <= page < pages else None


# ---------------------------------------------------------------------------------------------------------- prologue


def rotate(row, angles_row, offset, interleaved, components=None):
    """One head's channels, turned by [cos | sin] of its position (or of each pair's component)."""
    out = row.copy()
    for j in range(len(angles_row[0]) // 2):
        table = angles_row[components[j]] if components is not None else angles_row[0]
        if table is None:
            continue
        half = len(table) // 2
        a, b = (offset + 2 * j, offset + 2 * j + 1) if interleaved else (offset + j, offset + j + half)
        c, s = table[j], table[j + half]
        out[a], out[b] = c * row[a] - s * row[b], c * row[b] + s * row[a]
    return out


def prepare(p, which, rows, sequence, token, position):
    """The prologue on the heads [heads, dim] of one token."""
    index = "qkv".index(which)
    if p.qkv_scale is not None:
        rows = rows * np.float64(np.asarray(p.qkv_scale)[index])
    bias = getattr(p, which + "_bias")
    if bias is not None:
        rows = rows + f64(bias)
    if which in "kv" and getattr(p, "ia3_" + which) is not None:
        weights = f64(getattr(p, "ia3_" + which))
        task = 0 if p.ia3_task is None else int(p.ia3_task[sequence])
        if 0 <= task < len(weights):
            rows = rows * weights[task]
    if which in "qk" and p.rope_cos_sin is not None:
        tables = f64(p.rope_cos_sin)
        if tables.ndim == 2:
            tables = tables[None]
        choice = 0 if p.rope_table_index is None else int(p.rope_table_index[sequence])
        where = position if p.positions is None else int(np.asarray(p.positions)[token])
        if 0 <= choice < len(tables) and 0 <= where < tables.shape[1]:
            angle = [tables[choice, where]]
            rows = np.stack([rotate(row, angle, p.rope_offset or 0, bool(p.rope_interleaved)) for row in rows])
    if which == "q" and p.logn is not None:
        rows = rows * f64(p.logn)[min(max(position, 0), len(p.logn) - 1)]
    return rows


# --------------------------------------------------------------------------------------------------------- attention


def t5_bucket(relative, num_buckets, max_distance, bidirectional):
    n, base = num_buckets, 0
    if bidirectional:
        n //= 2
        base = n if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = n // 2
    if distance < exact:
        return base + distance
    # Exact in integers: the largest e with (max/exact)^(e/(n-exact)) <= distance/exact.
    steps = n - exact
    e = 0
    while e + 1 <= steps - 1 and max_distance ** (e + 1) * exact ** (steps - e - 1) <= distance**steps:
        e += 1
    return base + exact + e


def score_terms(f, b, head, i, position, j, s, n):
    z = 0.0
    if f.alibi_slopes is not None:
        slopes = f64(f.alibi_slopes)
        slope = slopes[b, head] if slopes.ndim == 2 else slopes[head]
        if f.alibi_sqrt:
            z -= slope * math.sqrt(position - j) if j <= position else 0.0
        else:
            z += slope * (j - position)
    if f.bias is not None:
        z += float(f64(f.bias)[head if f.bias.shape[0] > 1 else 0, position, j])
    if f.new_token_bias is not None and j >= s - n:
        z += float(f64(f.new_token_bias)[i, j - (s - n)])
    if f.t5_bias is not None:
        z += float(f64(f.t5_bias)[head, t5_bucket(j - position, f.t5_bias.shape[1], f.t5_max_distance, f.t5_bidirectional)])
    return z


def visible(f, b, row, head, position, j):
    seen = True
    if f.causal and j > position:
        seen = False
    if f.window_left is not None and f.window_left >= 0 and j < position - f.window_left:
        seen = False
    if f.window_right is not None and f.window_right >= 0 and j > position + f.window_right:
        seen = False
    if f.bidirectional_ranges is not None:
        for first, last in np.asarray(f.bidirectional_ranges)[b]:
            if first < last and first <= position <= last and first <= j <= last:
                seen = True
    if f.mask_bits is not None:
        bits = np.asarray(f.mask_bits)[row]
        if bits.ndim == 2:
            bits = bits[head]
        bit = j - (0 if f.mask_start is None else int(f.mask_start[b]))
        if 0 <= bit < 8 * len(bits) and not bits[bit // 8] >> (bit % 8) & 1:
            seen = False
    return seen


FIELDS = dict.fromkeys(attune._core.fields["attune_attention"])


def attention(q, k=None, v=None, **given):
    """SimpleNamespace of out, lse, max_logits (NaN in rows that nobody writes), weight = sum p |v| and products = the largest
    scale * sum |q_i k_i| of a row, all float64; appended = (sequence, position, k, v) of every new token."""
    unknown = given.keys() - FIELDS.keys()
    assert not unknown, unknown
    f = SimpleNamespace(**{**FIELDS, **given})
    p = f.prologue or attune.Prologue()
    shape = q.shape
    f.q_rank = len(shape)
    if len(shape) == 4:
        starts = np.arange(shape[0] + 1) * shape[1]
    elif f.cu_seqlens_q is not None:
        starts = np.asarray(f.cu_seqlens_q)
    else:
        starts = np.arange(shape[0] + 1) if f.cache is not None and f.indices is None else np.array([0, shape[0]])
    heads_q, d = shape[-2:]
    q = f64(q).reshape(-1, heads_q, d)
    batch = len(starts) - 1
    kv_starts = None
    if k is not None:
        if len(k.shape) == 4:
            kv_starts = np.arange(k.shape[0] + 1) * k.shape[1]
        elif f.cache is not None or f.cu_seqlens_kv is None:
            kv_starts = starts if f.cache is not None or f.cu_seqlens_q is not None else np.array([0, k.shape[0]])
        else:
            kv_starts = np.asarray(f.cu_seqlens_kv)
        heads_kv = k.shape[-2]
        k = f64(k).reshape(-1, heads_kv, k.shape[-1])
        v = None if v is None else f64(v).reshape(-1, heads_kv, v.shape[-1])
    else:
        heads_kv = 1 if f.cache.format in ("mla_656", "mla_584") else f.cache.k.shape[
            1 if f.cache.layout in ("hnd", "xpacked") else 2]
    d_v = f.head_dim_v or (v.shape[-1] if v is not None else 512 if f.cache.v is None else
                           f.cache.v.shape[2 if f.cache.layout == "xpacked" else -1])
    group = heads_q // heads_kv
    scale = f.softmax_scale or 1 / math.sqrt(d)
    total = q.shape[0]
    result = SimpleNamespace(out=np.full((total, heads_q, d_v), np.nan), lse=np.full((total, heads_q), np.nan),
                             max_logits=np.full((total, heads_q), np.nan), weight=np.zeros((total, heads_q, d_v)), products=np.zeros((total, heads_q)), appended=[])

    for b in range(batch):
        n = int(starts[b + 1] - starts[b])
        past = 0 if f.seqused_kv is None else int(f.seqused_kv[b])
        dense = 0 if kv_starts is None else int(kv_starts[b + 1] - kv_starts[b])
        if f.cache is not None:
            s = past + (n if k is not None else 0)
        else:
            s = dense if f.seqused_kv is None else min(past, dense)
        new = None
        if k is not None:
            new = []
            for t in range(dense):
                token = int(kv_starts[b]) + t
                key = prepare(p, "k", k[token], b, token, past + t) if f.cache is not None or has(p) else k[token]
                value = key[:, :d_v] if v is None else (
                    prepare(p, "v", v[token], b, token, past + t) if f.cache is not None or has(p) else v[token])
                new.append((key, value))
        done = f.finished is not None and bool(f.finished[b]) or f.skip_decode and n == 1  # left untouched
        if new is not None and f.cache is not None and p.append and not done:
            result.appended += [(b, past + t, key, value) for t, (key, value) in enumerate(new)]
        for i in range(n):
            row = int(starts[b]) + i
            if done:
                if f.zero_finished:
                    result.out[row], result.lse[row], result.max_logits[row] = 0, -np.inf, -np.inf
                continue
            position = s - n + i
            query = prepare(p, "q", q[row], b, row, position)
            for head in range(heads_q):
                h = head // group
                keys = list(candidates(f, b, row, i, n, head, h, position, s, past, new))
                one_row(f, result, row, head, query[head], keys, scale, d_v)
    return result


def has(p):
    return any(getattr(p, name) is not None for name in p.__slots__)


def candidates(f, b, row, i, n, head, h, position, s, past, new):
    """(key, value, additive term) of every visible key."""
    if f.indices is not None:
        for cache, indices, lengths in ((f.cache, f.indices, f.topk_length), (f.extra_cache, f.extra_indices, f.extra_topk_length)):
            if indices is None:
                continue
            flat = np.asarray(indices)
            flat = flat.reshape(-1, flat.shape[-1]) if f.q_rank == 4 else flat
            entries = flat[row] if flat.ndim == 2 else flat[row, h]
            if lengths is not None:
                entries = entries[: int(lengths[row if len(lengths) == len(flat) else b])]
            for slot in entries:
                if cache is None:
                    if 0 <= slot < s:
                        yield new[slot][0][h], new[slot][1][h], 0.0
                    continue
                pages, page_size = cache_shape(cache)
                if 0 <= slot < pages * page_size:
                    place = (int(slot) // page_size, int(slot) % page_size)
                    key = cache_row(cache, "k", *place, h)
                    yield key, key if cache.v is None else cache_row(cache, "v", *place, h), 0.0
        return
    for j in range(s):
        if not visible(f, b, row, head, position, j):
            continue
        if f.cache is not None and j < past:
            if f.cache.ring_capacity and j < past - f.cache.ring_capacity:
                continue
            owner = b
            if f.cache_indirection is not None:
                beam = 0 if j < f.beam_prompt_length[b] else int(f.cache_indirection[b, j])
                if not 0 <= beam < f.beam_width:
                    continue
                owner = b // f.beam_width * f.beam_width + beam
            place = locate(f.cache, owner, j)
            if place is None:
                continue
            key = cache_row(f.cache, "k", *place, h)
            value = key if f.cache.v is None else cache_row(f.cache, "v", *place, h)
        else:
            key, value = (x[h] for x in new[j - past if f.cache is not None else j])
        yield key, value, score_terms(f, b, head, i, position, j, s, n)


def one_row(f, result, row, head, query, keys, scale, d_v):
    if not keys:
        result.out[row, head] = 0
        result.lse[row, head] = result.max_logits[row, head] = -np.inf
        return
    z = scale * np.array([query @ key for key, _, _ in keys])
    if f.softcap:
        z = f.softcap * np.tanh(z / f.softcap)
    z = z + np.array([term for _, _, term in keys])
    result.products[row, head] = max(scale * (np.abs(query) @ np.abs(key)) for key, _, _ in keys)
    values = np.stack([value[:d_v] for _, value, _ in keys])
    m = z.max()
    weights = np.exp(z - m)
    denominator = weights.sum()
    result.lse[row, head], result.max_logits[row, head] = m + math.log(denominator), m
    if f.sinks is not None:
        denominator += math.exp(float(f64(f.sinks)[head]) - m)
    result.out[row, head] = weights @ values / denominator
    result.weight[row, head] = weights @ np.abs(values) / denominator
