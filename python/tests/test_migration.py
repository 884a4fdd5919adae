# SPDX-License-Identifier: Apache-2.0
"""What the tables of docs/migration.md say a call becomes, against float64. Names on the right exist; calls there mean what those on
the left do."""

import importlib
import inspect
import math
import pathlib
import re

import numpy as np
import pytest

from places import TABLE, Here, check, everywhere, exact, expect, floats, ints, paged, rand, randn, start, torch  # noqa: F401

import attune
from attune import _core
from attune.compat import flash_attn, flash_attn_interface as flash_attn_3, flash_mla
from compare import COMPUTE, dtype_name
from plain import assert_same, plain

TEXT = (pathlib.Path(__file__).parents[2] / "docs/migration.md").read_text()


def rows():
    """(section, first cell, the others) of every row of a table."""
    section = ""
    for line in TEXT.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("|") and not re.match(r"\|[-| ]+\|$", line):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            yield section, cells[0], cells[1:]


ELSEWHERE = {"k", "v", "indices", "b_seq_len", "qq_bias", "mm_prefix_range", "use_alibi_sqrt", "output_scale", "bmm2_scale"}  # and theirs


def test_names_on_the_right_exist():
    known = {"plan", "attention"}.union(*(_core.fields[struct] for struct in _core.fields))
    for function in (attune.attention, attune.Plan, attune.KVCache, attune.Prologue, attune.cache_append, attune.merge, attune.supported):
        known |= set(inspect.signature(function).parameters)
    named = set()
    for section, first, cells in rows():
        for span in re.findall(r"`([^`]+)`", cells[-1] if section != "The conventions side by side" else first):
            named.update(re.findall(r"\b(\w+)=", span))
            if re.fullmatch(r"\w+", span):
                named.add(span)
            for path in re.findall(r"\battune(?:\.\w+)+", span):
                where, _, name = path.rpartition(".")
                try:
                    importlib.import_module(path)
                except ImportError:
                    assert hasattr(importlib.import_module(where), name), path
    wrong = {name for name in named - known - ELSEWHERE if not hasattr(attune, name) and not hasattr(attune.Plan, name)}
    assert len(named) > 50 and not wrong, wrong


# ------------------------------------------------------------------------------------------------------ FlashAttention


@everywhere
def test_dense_and_ragged_calls():
    q, k, v = randn(9, 4, 16), randn(13, 2, 16), randn(13, 2, 16)
    starts_q, starts_kv = ints(0, 4, 9), ints(0, 3, 13)
    out, lse = attune.attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv, max_seqlen_q=5, max_seqlen_kv=10, seqused_kv=ints(3, 8),
                                softmax_scale=0.3, softcap=2.0, causal=True, window_left=4, window_right=-1, alibi_slopes=attune.alibi_slopes(4, like=q),
                                return_lse=True)
    theirs, theirs_lse = flash_attn_3.flash_attn_varlen_func(q, k, v, starts_q, starts_kv, 5, 10, None, ints(3, 8), 0.3, True, softcap=2.0,
                                                             window_size=(4, -1), return_attn_probs=True)
    assert out.shape == theirs.shape and lse.transpose(-1, -2).shape == theirs_lse.shape
    plain_out, plain_lse = attune.attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv, seqused_kv=ints(3, 8), softmax_scale=0.3,
                                            softcap=2.0, causal=True, window_left=4, return_lse=True)
    assert torch.equal(plain_out, theirs) and torch.equal(plain_lse.transpose(-1, -2), theirs_lse)
    check(out, expect(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv, seqused_kv=ints(3, 8), softmax_scale=0.3, softcap=2.0,
                      causal=True, window_left=4, alibi_slopes=attune.alibi_slopes(4, like=q)))


@everywhere
def test_alibi_without_causal_by_a_table():
    q, k, v, slopes, n = randn(2, 5, 4, 16), randn(2, 9, 2, 16), randn(2, 9, 2, 16), rand(4), 9
    one_side = -slopes[:, None] * torch.arange(2 * n, device=q.device)
    out = attune.attention(q, k, v, t5_bias=torch.cat([one_side, one_side], 1), t5_bidirectional=True, t5_max_distance=n + 1)
    for b in range(2):
        assert_same(out[b], plain(q[b], k[b], v[b], slopes=slopes)[0])


@everywhere
def test_pages_with_cu_seqlens_k():
    q, (k, v), starts_q, cu_seqlens_k = randn(9, 4, 16), paged(6, 16, 2, 16), ints(0, 4, 9), ints(0, 40, 57)
    out = attune.attention(q, cache=attune.KVCache(k, v, page_table=ints(*TABLE)), cu_seqlens_q=starts_q, seqused_kv=cu_seqlens_k.diff(),
                           causal=True)
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(q, k, v, starts_q, cu_seqlens_k, 5, 40, causal=True, block_table=ints(*TABLE)))


@everywhere
def test_qv_side_by_side():
    q, qv, k, v = randn(2, 5, 4, 16), randn(2, 5, 4, 32), randn(2, 7, 2, 16), randn(2, 7, 2, 32)
    out = attune.attention(torch.cat([qv, q], -1), torch.cat([v, k], -1), head_dim_v=32)
    for b in range(2):
        assert_same(out[b], plain(torch.cat([qv[b], q[b]], -1), torch.cat([v[b], k[b]], -1), v[b])[0])


@everywhere
def test_descales():
    codes = [randn(2, n, heads, 32).to(torch.float8_e4m3fn) for n, heads in ((5, 4), (7, 2), (7, 2))]
    out = attune.attention(*codes, prologue=attune.Prologue(qkv_scale=floats(0.5, 2.0, 1.5)), out_dtype="bfloat16", causal=True)
    q, k, v = (x.float() * scale for x, scale in zip(codes, (0.5, 2.0, 1.5)))
    for b in range(2):
        bound = 4 * COMPUTE["bfloat16"] if Here.device == "cpu" else 2**-3
        torch.testing.assert_close(out[b].double().cpu(), plain(q[b], k[b], v[b], causal=True)[0], rtol=bound, atol=bound)
    q, (k, v), scales = randn(2, 4, 32), [x.to(torch.float8_e4m3fn) for x in paged(6, 16, 2, 32)], [rand(2) + 0.5, rand(2) + 0.5]
    cache = attune.KVCache(k, v, page_table=ints(*TABLE), k_scale=scales[0], v_scale=scales[1])
    check(attune.attention(q, cache=cache, seqused_kv=ints(40, 17)), expect(q, cache=cache, seqused_kv=ints(40, 17)))


@everywhere
def test_a_cache_with_new_tokens_and_rotary_tables():
    q, k, v, angles = randn(2, 3, 4, 32), randn(2, 3, 2, 32), randn(2, 3, 2, 32), rand(64, 8) * 6
    cos, sin, lengths, index = angles.cos(), angles.sin(), ints(30, 11), ints(2, 0)
    caches = paged(3, 48, 2, 32)
    theirs = [x.clone() for x in caches]
    want, want_lse = flash_attn.flash_attn_with_kvcache(q, *theirs, k, v, cos, sin, lengths, index, ints(5, 0), causal=True,
                                                        return_softmax_lse=True)
    bits = np.packbits(np.arange(48)[None] >= np.array([[5], [0]]), axis=-1, bitorder="little").repeat(3, 0)
    out, lse = attune.attention(q, k, v, cache=attune.KVCache(*caches, batch_index=index), seqused_kv=lengths, causal=True,
                                mask_bits=torch.from_numpy(bits).to(q.device), return_lse=True,
                                prologue=attune.Prologue(append=True, rope_cos_sin=torch.cat([cos, sin], -1), rope_interleaved=True))
    assert torch.equal(out, want) and torch.equal(lse.transpose(-1, -2), want_lse)
    assert all(torch.equal(a, b) for a, b in zip(caches, theirs))


@everywhere
def test_packed_and_partial_results():
    qkv = randn(2, 5, 3, 4, 16)
    assert torch.equal(attune.attention(*qkv.unbind(-3)), flash_attn.flash_attn_qkvpacked_func(qkv))
    partial, lse = torch.randn(3, 10, 4, 16, device=Here.device), rand(3, 10, 4)
    out, whole = attune.merge(partial, lse, return_lse=True)
    want, want_whole = flash_attn_3.flash_attn_combine(partial.unflatten(1, (2, 5)), lse.unflatten(1, (2, 5)))
    assert torch.equal(out, want.flatten(0, 1)) and torch.equal(whole, want_whole.flatten(0, 1))


@everywhere
def test_a_plan_in_place_of_metadata():
    q, (k, v), lengths = randn(2, 4, 16), paged(6, 16, 2, 16), ints(40, 17)
    layers = [(k, v), (v, k)]
    cache = attune.KVCache(k, v, page_table=ints(*TABLE))
    plan = attune.Plan(q, cache=cache, seqused_kv=lengths)
    plan.schedule()
    for one in layers:
        cache = attune.KVCache(*one, page_table=ints(*TABLE))
        check(plan.run_scheduled(cache=cache), expect(q, cache=cache, seqused_kv=lengths))


# ---------------------------------------------------------------------------------------------------------- FlashInfer


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@everywhere
def test_one_tensor_of_pages(layout):
    kv = randn(6, 2, 16, 2, 32) if layout == "nhd" else randn(6, 2, 2, 16, 32)
    cache = attune.KVCache(kv[:, 0], kv[:, 1], page_table=ints(*TABLE), layout=layout)
    assert cache.k.data_ptr() == kv.data_ptr()
    lengths, sinks = ints(40, 17), rand(4)
    decode = randn(2, 4, 32)
    out, lse = attune.attention(decode, cache=cache, seqused_kv=lengths, softcap=3.0, softmax_scale=0.2 * 0.5, window_left=9, sinks=sinks,
                                return_lse=True, batch_invariant=True)
    check(out, expect(decode, cache=cache, seqused_kv=lengths, softcap=3.0, softmax_scale=0.1, window_left=9, sinks=sinks))
    # In base 2, as FlashInfer's; of scores in float64, without the sinks. CPUs with bfloat16 products may add rounded weights.
    rounds = "arithmetic bf16" in attune.Plan(decode, cache=cache, seqused_kv=lengths).describe()
    for b, n in enumerate((40, 17)):
        k = exact(cache.k if layout == "nhd" else cache.k.transpose(1, 2)).astype(np.float64)
        keys = k[[p for p in TABLE[b] if p < 6]].reshape(-1, 2, 32)[:n][-10:].repeat(2, axis=1)
        scores = 3 * np.tanh(np.einsum("hd,khd->hk", exact(decode[b]).astype(np.float64), keys) * 0.1 / 3)
        np.testing.assert_allclose(exact(lse)[b] * math.log2(math.e), np.log2(np.exp(scores).sum(-1)),
                                   atol=2**-8 if rounds else 1e-4)
    prompts = randn(9, 4, 32)
    check(attune.attention(prompts, cache=cache, seqused_kv=lengths, cu_seqlens_q=ints(0, 4, 9), causal=True),
          expect(prompts, cache=cache, seqused_kv=lengths, cu_seqlens_q=ints(0, 4, 9), causal=True))


@everywhere
def test_a_workspace_that_is_given():
    q, (k, v), lengths = randn(2, 4, 16), paged(6, 16, 2, 16), ints(40, 17)
    fields = {"cache": attune.KVCache(k, v, page_table=ints(*TABLE)), "seqused_kv": lengths}
    size = attune.Plan(q, **fields).workspace_size
    room = torch.empty(size + 256, dtype=torch.uint8, device=q.device)
    begin = -room.data_ptr() % 256
    plan = attune.Plan(q, workspace=room[begin : begin + size], **fields)
    assert torch.equal(plan.run(), attune.attention(q, **fields))


@everywhere
def test_single_sequences_and_positions():
    q, k, v = randn(5, 4, 32), randn(9, 2, 32), randn(9, 2, 32)
    for causal in True, False:
        out, lse = attune.attention(q, k, v, causal=causal, return_lse=True)
        want, want_lse = plain(q, k, v, causal=causal)
        assert_same(out, want)
        assert_same(lse.transpose(-1, -2), want_lse, factor=16)
    hnd = [x.transpose(0, 1).contiguous() for x in (k, v)]
    assert torch.equal(attune.attention(q, *(x.transpose(0, 1) for x in hnd)), attune.attention(q, k, v))
    decode = randn(4, 32)
    assert_same(attune.attention(decode[None], k, v)[0], plain(decode[None], k, v)[0][0])
    slopes = attune.alibi_slopes(4, like=q)
    assert slopes.tolist() == [2.0 ** -(2 * (i + 1)) for i in range(4)]
    assert_same(attune.attention(q, k[:5], v[:5], causal=True, alibi_slopes=slopes), plain(q, k[:5], v[:5], causal=True, slopes=slopes)[0])
    table = attune.rope_table(64, 32, theta=1e4, scale=2.0, like=q)
    prologue = attune.Prologue(rope_cos_sin=table)
    turned = []
    for x in (q, k[:5]):
        angle = torch.arange(5)[:, None] / 2.0 * 1e4 ** (-torch.arange(0, 32, 2) / 32)
        c, s, x = angle.cos()[:, None], angle.sin()[:, None], x.double().cpu()
        turned.append(torch.cat([x[..., :16] * c - x[..., 16:] * s, x[..., 16:] * c + x[..., :16] * s], -1))
    assert_same(attune.attention(q, k[:5], v[:5], causal=True, prologue=prologue), plain(*turned, v[:5], causal=True)[0], factor=8)


@everywhere
def test_latent_rows_of_two_parts():
    q_nope, q_pe, rows = randn(2, 4, 512) / 8, randn(2, 4, 64) / 8, randn(6, 16, 1, 576)
    out = attune.attention(torch.cat([q_nope, q_pe], -1), cache=attune.KVCache(rows, page_table=ints(*TABLE)), seqused_kv=ints(40, 17),
                           head_dim_v=512, softmax_scale=0.1)
    for b, n in enumerate((40, 17)):
        keys = rows[[p for p in TABLE[b] if p < 6]].flatten(0, 1)[:n]
        want = plain(torch.cat([q_nope, q_pe], -1)[b : b + 1], keys, keys[..., :512], scale=0.1)[0]
        assert_same(out[b : b + 1], want, factor=8)


@everywhere
def test_new_tokens_by_slots_or_in_the_run():
    (k_cache, v_cache), k, v = paged(6, 16, 2, 32), randn(2, 2, 32), randn(2, 2, 32)
    q, table = randn(2, 4, 32), ints(*TABLE)
    others = k_cache.clone(), v_cache.clone()
    slots = torch.tensor([2 * 16 + 8, 3 * 16 + 1], device=q.device)
    attune.cache_append(attune.KVCache(k_cache, v_cache), k, v, slots=slots)
    by_lengths = others[0].clone(), others[1].clone()
    attune.cache_append(attune.KVCache(*by_lengths, page_table=table), k, v, cu_seqlens=ints(0, 1, 2), seqused_kv=ints(40, 17))
    assert torch.equal(by_lengths[0], k_cache) and torch.equal(by_lengths[1], v_cache)
    want = attune.attention(q, cache=attune.KVCache(k_cache, v_cache, page_table=table), seqused_kv=ints(41, 18))
    got = attune.attention(q, k, v, cache=attune.KVCache(*others, page_table=table), seqused_kv=ints(40, 17), prologue=attune.Prologue(append=True))
    assert torch.equal(others[0], k_cache) and torch.equal(others[1], v_cache)
    torch.testing.assert_close(got, want)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k) and torch.equal(v_cache.flatten(0, 1)[slots], v)


# ------------------------------------------------------------------------------------------------------------ FlashMLA


def packed(width):
    """(cache of 4 pages as attune has it, as FlashMLA has it)"""
    size = attune.kv_page_bytes(f"mla_{width}", 16)
    data = torch.zeros(4, size, dtype=torch.uint8, device=Here.device)
    if width == 656:
        k_cache = data.view(4, 16, 1, 656).view(torch.float8_e4m3fn)
        cache = attune.KVCache(k_cache.squeeze(2).view(torch.uint8), format="mla_656")
    else:
        k_cache = data[:, : 16 * 584].view(4, 16, 1, 584).view(torch.float8_e4m3fn)
        cache = attune.KVCache(data, format="mla_584", page_size=16)
    attune.cache_quantize(cache, randn(64, 1, 576 if width == 656 else 512))
    return cache, k_cache


@pytest.mark.parametrize("width", [656, 584])
@everywhere
def test_flash_mla_over_packed_rows(width):
    (cache, k_cache), (extra, extra_cache) = packed(width), packed(width)
    q, sinks = randn(2, 2, 4, 576 if width == 656 else 512), rand(4)
    indices, more = (torch.randint(0, 64, (2, 2, n), dtype=torch.int32).to(q.device) for n in (9, 4))
    options = {"topk_length": ints(7, 0), "extra_topk_length": ints(4, 0)}
    out, lse = attune.attention(q, cache=cache, indices=indices, sinks=sinks, extra_cache=extra, extra_indices=more, head_dim_v=512,
                                batch_invariant=True, return_lse=True, **options)
    want, want_lse = flash_mla.flash_mla_with_kvcache(q, k_cache, None, None, 512, flash_mla.get_mla_metadata()[0], is_fp8_kvcache=True,
                                                      indices=indices, attn_sink=sinks, extra_k_cache=extra_cache,
                                                      extra_indices_in_kvcache=more, enable_batch_invariant=True, **options)
    assert torch.equal(out, want)
    assert torch.equal(lse.masked_fill(lse.isneginf(), math.inf).transpose(1, 2), want_lse) and lse[1].isneginf().all()


@everywhere
def test_flash_mla_prompts():
    q, kv, indices = randn(5, 4, 576), randn(30, 1, 576), torch.randint(0, 30, (5, 1, 12), dtype=torch.int32).to(Here.device)
    out, lse, max_logits = attune.attention(q, kv, indices=indices, softmax_scale=0.05, head_dim_v=512, return_lse=True, return_max_logits=True)
    want = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05, 512)
    assert all(torch.equal(a, b) for a, b in zip((out, max_logits, lse), want))
    q, k, v = randn(9, 4, 192), randn(13, 2, 192), randn(13, 2, 128)
    check(attune.attention(q, k, v, cu_seqlens_q=ints(0, 4, 9), cu_seqlens_kv=ints(0, 3, 13), causal=True),
          expect(q, k, v, cu_seqlens_q=ints(0, 4, 9), cu_seqlens_kv=ints(0, 3, 13), causal=True))


# ---------------------------------------------------------------------------------------------------- operators of vLLM


@pytest.mark.parametrize("layout", ["nhd", "xpacked"])
@pytest.mark.parametrize("eight_bit", [False, True])
@everywhere
def test_reshape_and_cache(layout, eight_bit):
    k, v, slots = randn(3, 2, 32), randn(3, 2, 32), torch.tensor([17, -1, 40], device=Here.device)
    dtype = torch.float8_e4m3fn if eight_bit else Here.dtype
    if layout == "nhd":
        caches = [torch.zeros(6, 16, 2, 32, device=Here.device).to(dtype) for _ in range(2)]
    else:
        caches = [torch.zeros(shape, device=Here.device).to(dtype) for shape in ((6, 2, 4, 16, 8), (6, 2, 32, 16))]
    scales = {"k_scale": floats(0.5), "v_scale": floats(2.0)} if eight_bit else {}
    attune.cache_append(attune.KVCache(*caches, layout=layout, **scales), k, v, slots=slots)
    for cache, x, scale in zip(caches, (k, v), (0.5, 2.0)):
        cache = cache.float()
        if layout == "xpacked":
            cache = cache.permute(0, 3, 1, 2, 4).flatten(3) if cache.dim() == 5 else cache.permute(0, 3, 1, 2)
        want = torch.zeros(96, 2, 32, device=x.device)
        want[[17, 40]] = ((x.float() / scale).to(dtype) if eight_bit else x).float()[[0, 2]]
        assert torch.equal(cache.flatten(0, 1), want)


@everywhere
def test_concat_and_cache_mla():
    kv_c, k_pe, slots = randn(3, 512), randn(3, 64), torch.tensor([17, -1, 40], device=Here.device)
    rows = torch.cat([kv_c, k_pe], -1)[:, None]
    cache = torch.zeros(6, 16, 576, dtype=Here.dtype, device=Here.device)
    attune.cache_append(attune.KVCache(cache.unsqueeze(2)), rows, slots=slots)
    assert torch.equal(cache.flatten(0, 1)[[17, 40]], rows[[0, 2], 0]) and cache.count_nonzero() <= 2 * 576
    data = torch.zeros(6, 16, 656, dtype=torch.uint8, device=Here.device)  # "fp8_ds_mla"
    packed_rows = attune.KVCache(data, format="mla_656")
    attune.cache_append(packed_rows, rows, slots=slots)
    back = torch.zeros(2, 1, 576, device=Here.device)
    attune.cache_gather(packed_rows, back, slots=slots[[0, 2]])
    torch.testing.assert_close(back, rows[[0, 2]].float(), rtol=2**-4, atol=2**-6)


@everywhere
def test_gather_and_merge():
    (k, v), lengths = paged(6, 16, 2, 32), ints(40, 17)
    keys, values = randn(57, 2, 32), randn(57, 2, 32)
    attune.cache_gather(attune.KVCache(k, v, page_table=ints(*TABLE)), keys, values, cu_seqlens=ints(0, 40, 57), seqused_kv=lengths)
    for got, pages in ((keys, k), (values, v)):
        assert torch.equal(got[:40], pages[TABLE[0]].flatten(0, 1)[:40]) and torch.equal(got[40:], pages[TABLE[1][:2]].flatten(0, 1)[:17])
    src, dst, cu_seq_lens = randn(6, 16, 576), randn(57, 576), ints(0, 40, 57)  # of cp_gather_cache
    attune.cache_gather(attune.KVCache(src.unsqueeze(2), page_table=ints(*TABLE)), dst[:, None], cu_seqlens=cu_seq_lens,
                        seqused_kv=cu_seq_lens.diff())
    assert torch.equal(dst[:40], src[TABLE[0]].flatten(0, 1)[:40]) and torch.equal(dst[40:], src[TABLE[1][:2]].flatten(0, 1)[:17])
    # merge_attn_states: prefix and suffix, with lse [heads, tokens] there.
    q, parts = randn(5, 4, 32), []
    for part in (slice(7), slice(7, 40)):
        parts.append(attune.attention(q, keys[part], values[part], cu_seqlens_q=ints(0, 5), cu_seqlens_kv=ints(0, part.stop - (part.start or 0)),
                                      return_lse=True))
    (prefix, prefix_lse), (suffix, suffix_lse) = ((out, lse.T.contiguous()) for out, lse in parts)
    out, lse = attune.merge(torch.stack([prefix, suffix]), torch.stack([prefix_lse.T, suffix_lse.T]), return_lse=True)
    want, want_lse = plain(q, keys[:40], values[:40])
    assert_same(out, want, factor=8)
    assert_same(lse.transpose(0, 1), want_lse, factor=16)


@everywhere
def test_rope_with_cache_update():
    q, k, v, (k_cache, v_cache), lengths = randn(2, 4, 32), randn(2, 2, 32), randn(2, 2, 32), paged(6, 16, 2, 32), ints(40, 17)
    others = k_cache.clone(), v_cache.clone()
    prologue = attune.Prologue(rope_cos_sin=attune.rope_table(64, 32, like=q), append=True)
    table = ints(*TABLE)
    q_out, k_out, v_out = attune.qkv_prepare(q, k, v, prologue=prologue, cache=attune.KVCache(k_cache, v_cache, page_table=table),
                                             seqused_kv=lengths)
    assert torch.equal(k_cache[2, 8], k_out[0]) and torch.equal(v_cache[3, 1], v_out[1])
    got = attune.attention(q_out, cache=attune.KVCache(k_cache, v_cache, page_table=table), seqused_kv=lengths + 1)
    in_the_call = attune.attention(q, k, v, cache=attune.KVCache(*others, page_table=table), seqused_kv=lengths, prologue=prologue)
    bound = 4 * COMPUTE[dtype_name(q)]
    torch.testing.assert_close(got.float(), in_the_call.float(), rtol=bound, atol=bound)
    assert torch.equal(others[0], k_cache) and torch.equal(others[1], v_cache)


@everywhere
def test_scales_of_queries_and_of_values():
    """q_scale beside k_scale of a 16-bit cache go into softmax_scale; bmm1_scale and bmm2_scale of trtllm's call."""
    q, (k, v), lengths, table = randn(2, 4, 32), paged(6, 16, 2, 32), ints(40, 17), ints(*TABLE)
    out = attune.attention(q, cache=attune.KVCache(k, v, page_table=table), seqused_kv=lengths, softmax_scale=0.5 * 2.0 * 32**-0.5)
    check(out, expect(q * 0.5, cache=attune.KVCache(k * 2, v, page_table=table), seqused_kv=lengths))
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    out = attune.attention(q, cache=attune.KVCache(k, v, page_table=table, v_scale=floats(1.5)), seqused_kv=lengths, softmax_scale=0.1)
    check(out, expect(q, cache=attune.KVCache(k.float(), v.float() * 1.5, page_table=table), seqused_kv=lengths, softmax_scale=0.1))
    codes = q.to(torch.float8_e4m3fn)
    out = attune.attention(codes, cache=attune.KVCache(k, v, page_table=table), seqused_kv=lengths, out_dtype="bfloat16",
                           prologue=attune.Prologue(qkv_scale=floats(0.5, 1, 1)))
    want = attune.attention(codes.float() * 0.5, cache=attune.KVCache(k.float(), v.float(), page_table=table), seqused_kv=lengths)
    bound = 4 * COMPUTE["bfloat16"] if Here.device == "cpu" else 2**-3
    torch.testing.assert_close(out.float(), want, rtol=bound, atol=bound)


def test_what_is_not_covered_is_refused_by_name():
    x = attune.Spec((2, 5, 4, 16), "bfloat16")
    assert attune.supported(x, x, x)
    assert attune.supported(x, x, x, capability=(7, 5)).reason == "a GPU that has compute capability 7.5; the kernels need 8.0 (Ampere) or newer"


def refused(function, name, *args, **fields):
    with pytest.raises(NotImplementedError, match=rf"^{function.__name__}: {name} (is|has)"):
        function(*args, **fields)
    return {name}


@everywhere
def test_what_flash_attn_here_does_not_take():
    """Each line of "Not taken", and that what it names instead is taken."""
    listed = TEXT.split("**Not taken** by")[1].split("\n## ")[0]
    x, lengths, offsets = randn(2, 6, 4, 64), ints(3, 5), ints(0, 6, 12)
    names = refused(flash_attn.flash_attn_func, "dropout_p", x, x, x, dropout_p=0.1)
    names |= refused(flash_attn_3.flash_attn_func, "attention_chunk", x, x, x, attention_chunk=2)
    ragged = [x.flatten(0, 1)] * 3
    names |= refused(flash_attn_3.flash_attn_varlen_func, "seqused_q", *ragged, offsets, offsets, 6, 6, seqused_q=lengths)
    k_cache, v_cache = randn(2, 8, 4, 64), randn(2, 8, 4, 64)
    decode = flash_attn_3.flash_attn_with_kvcache
    for name in ("rotary_seqlens", "cu_seqlens_k_new"):
        names |= refused(decode, name, x, k_cache, v_cache, cache_seqlens=lengths, **{name: lengths})

    for slopes in (floats(0.5, 0.25, 0.125, 0.0625), floats(0.5, 0.25, 0.125, 0.0625).expand(2, 4)):
        flash_attn.flash_attn_func(x, x, x, alibi_slopes=slopes, causal=True)
    names |= refused(flash_attn.flash_attn_func, "alibi_slopes", x, x, x, alibi_slopes=slopes)
    flash_attn.flash_attn_func(x, x, x, alibi_slopes=slopes[0])

    codes, each = x.to(torch.float8_e4m3fn), floats(*range(1, 9)).view(2, 4)
    codes_k, codes_v = k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn)
    for name in ("q_descale", "k_descale", "v_descale"):
        for many in (each, each[:1]):
            names |= refused(flash_attn_3.flash_attn_func, name, codes, codes, codes, **{name: many})
        flash_attn_3.flash_attn_func(codes, codes, codes, **{name: each[:1, :1].expand(2, 4)})
        names |= refused(decode, name, x, codes_k, codes_v, cache_seqlens=lengths, **{name: each})
        decode(codes, codes_k, codes_v, cache_seqlens=lengths, **{name: each[:1].expand(2, 4)})
    names |= refused(decode, "k", codes, codes_k, codes_v, k=codes[:, :1], v=codes[:, :1], cache_seqlens=lengths) | {"v"}

    rows, qv = randn(2, 8, 1, 576) / 4, randn(2, 6, 4, 512)
    decode(x, rows[..., 512:], rows[..., :512], qv=qv, cache_seqlens=lengths)
    names |= refused(decode, "qv", x, rows[..., 512:].clone(), rows[..., :512], qv=qv, cache_seqlens=lengths)
    assert names | {"k_cache", "v_cache"} == set(re.findall(r"`(\w+)`", listed))


@everywhere
def test_queries_of_latents_in_two_parts():
    """FlashInfer's q_nope and q_pe, FlashAttention-3's qv and q, and those of engines."""
    nope, pe, rows = randn(16, 2, 512).transpose(0, 1), randn(2, 16, 3 * 64)[..., 64:128], randn(6, 16, 1, 576) / 4
    fields = {"cache": attune.KVCache(rows, page_table=ints(*TABLE)), "seqused_kv": ints(40, 17), "head_dim_v": 512, "return_lse": True}
    whole, lse_of_whole = attune.attention(torch.cat([nope, pe], -1), **fields)
    out, lse = attune.attention(nope, q_rope=pe, **fields)
    assert torch.equal(out, whole) and torch.equal(lse, lse_of_whole)
    plan = attune.Plan(nope, q_rope=pe, **fields)
    assert torch.equal(plan.run(q=2 * nope, q_rope=pe)[0], attune.attention(2 * nope, q_rope=pe, **fields)[0])
    with pytest.raises(attune.InvalidArgument, match="q_rope is absent; the plan was made with it"):
        plan.run(q=torch.cat([nope, pe], -1), q_rope=None)
    with pytest.raises(attune.InvalidArgument, match=r"q_rope\.shape\[1\] is 15; it must be 16 \(as q\)"):
        attune.attention(nope, q_rope=pe[:, :15], **fields)
    assert torch.equal(plan.run(q=nope.reshape(2, -1), q_rope=pe.reshape(2, -1))[0], out)
    for parts in ((nope.clone().requires_grad_(), pe), (nope, pe.clone().requires_grad_())):
        with pytest.raises(attune.InvalidArgument, match="q_rope (is given, and gradients are wanted|requires grad)"):
            attune.attention(parts[0], q_rope=parts[1], **fields)
