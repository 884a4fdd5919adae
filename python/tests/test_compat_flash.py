# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's calls beyond plain attention: distances in both directions, padding in front, qv and descales, in float64."""

import re

import pytest

from places import TABLE, Here, everywhere, exact, ints, paged, rand, randn, start, torch  # noqa: F401

import attune
from attune.compat import flash_attn, flash_attn_interface as flash_attn_3, flash_mla
from compare import COMPUTE, dtype_name
from plain import assert_same, plain


# ------------------------------------------------------------------------------------------------------ ALiBi


@pytest.mark.parametrize("rows, keys", [(7, 7), (5, 9), (9, 5), (1, 40)])
@pytest.mark.parametrize("options", [{}, {"window_size": (3, 2)}, {"window_size": (-1, 4)}, {"causal": True}])
@everywhere
def test_alibi_is_of_absolute_distances(rows, keys, options):
    q, k, v, slopes = randn(2, rows, 4, 16), randn(2, keys, 2, 16), randn(2, keys, 2, 16), rand(4)
    out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes, **options)
    for b in range(2):
        want, _ = plain(q[b], k[b], v[b], causal=options.get("causal", False), window=options.get("window_size", (-1, -1)), slopes=slopes)
        assert_same(out[b], want)
    one = flash_attn.flash_attn_func(q[:1], k[:1], v[:1], alibi_slopes=slopes[None], **options)
    assert_same(one[0], plain(q[0], k[0], v[0], causal=options.get("causal", False), window=options.get("window_size", (-1, -1)),
                              slopes=slopes)[0])


@everywhere
def test_alibi_of_an_empty_batch():
    nothing = randn(0, 2, 16)
    out, lse, _ = flash_attn.flash_attn_varlen_func(nothing, nothing, nothing, ints(0, 0), ints(0, 0), 0, 0, alibi_slopes=rand(2),
                                                    return_attn_probs=True)
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)


@everywhere
def test_alibi_of_ragged_sequences_and_caches():
    q, k, v, slopes = randn(9, 4, 16), randn(13, 2, 16), randn(13, 2, 16), rand(4)
    out = flash_attn.flash_attn_varlen_func(q, k, v, ints(0, 4, 9), ints(0, 3, 13), 5, 10, alibi_slopes=slopes)
    assert_same(out, torch.cat([plain(q[:4], k[:3], v[:3], slopes=slopes)[0], plain(q[4:], k[3:], v[3:], slopes=slopes)[0]]))
    q, (k_cache, v_cache) = randn(2, 3, 4, 16), paged(2, 9, 2, 16)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ints(9, 4), alibi_slopes=slopes)
    for b, n in enumerate((9, 4)):
        assert_same(out[b], plain(q[b], k_cache[b, :n], v_cache[b, :n], slopes=slopes)[0])


def test_alibi_has_gradients():
    q, k, v = (torch.randn(1, 6, 2, 16).requires_grad_() for _ in range(3))
    slopes = torch.tensor([0.5, 0.1])
    out = flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes)
    bias = -slopes[:, None, None] * (torch.arange(6)[:, None] - torch.arange(6)).abs()
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias)
    for got, wanted in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), torch.autograd.grad(want.square().sum(), (q, k, v))):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------ padding in front


@pytest.mark.parametrize("table", [None, TABLE])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": True, "window_size": (6, 0)}])
@everywhere
def test_cache_leftpad(options, table):
    used, begin = [40, 17], [13, 17]  # the second sequence is empty
    q, (k_cache, v_cache) = randn(2, 3, 4, 32), paged(*((6, 16) if table else (2, 48)), 2, 32)
    paging = {} if table is None else {"block_table": ints(*table)}
    for module in (flash_attn, flash_attn_3):
        if module is flash_attn_3 and table is not None:
            paging = {"page_table": paging["block_table"]}
        out, lse = module.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ints(*used), cache_leftpad=ints(*begin),
                                                  return_softmax_lse=True, **options, **paging)
        for b in range(2):
            k, v = (x[b] if table is None else x[torch.tensor(table[b][:3]).clamp(max=5)].flatten(0, 1) for x in (k_cache, v_cache))
            want, want_lse = plain(q[b], k[:used[b]], v[:used[b]], causal=options["causal"],
                                   window=options.get("window_size", (-1, -1)), begin=begin[b])
            assert_same(out[b], want)
            empty = torch.inf if module is flash_attn else -torch.inf
            assert_same(lse[b], want_lse.masked_fill(want_lse.isneginf(), empty), factor=16)


@everywhere
def test_cache_leftpad_and_new_tokens():
    q, k, v = randn(2, 2, 4, 16), randn(2, 2, 2, 16), randn(2, 2, 2, 16)
    k_cache, v_cache = paged(2, 24, 2, 16)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=ints(11, 20), cache_leftpad=ints(3, 20), causal=True)
    for b, (n, begin) in enumerate(((11, 3), (20, 20))):
        assert torch.equal(k_cache[b, n : n + 2], k[b]) and torch.equal(v_cache[b, n : n + 2], v[b])
        assert_same(out[b], plain(q[b], k_cache[b, : n + 2], v_cache[b, : n + 2], causal=True, begin=begin)[0])


# -------------------------------------------------------------------------------------------------------------- version 3


@everywhere
def test_version_3_functions():
    q, k, v = randn(2, 5, 4, 16), randn(2, 7, 2, 16), randn(2, 7, 2, 32)
    out, lse = flash_attn_3.flash_attn_func(q, k, v, None, True, window_size=(4, 0), return_attn_probs=True)
    for b in range(2):
        want, want_lse = plain(q[b], k[b], v[b], causal=True, window=(4, 0))
        assert_same(out[b], want)
        assert_same(lse[b], want_lse, factor=16)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    ragged, lse = flash_attn_3.flash_attn_varlen_func(*flat, ints(0, 5, 10), ints(0, 7, 14), 5, 7, seqused_k=ints(7, 2), causal=True,
                                                      return_attn_probs=True)
    want, want_lse = plain(q[1], k[1, :2], v[1, :2], causal=True)
    assert_same(ragged[5:], want)
    assert_same(lse[:, 5:], want_lse, factor=16)
    pages = paged(6, 16, 2, 16)
    out = flash_attn_3.flash_attn_with_kvcache(flat[0], *pages, cache_seqlens=ints(40, 17), page_table=ints(*TABLE), causal=True,
                                               cu_seqlens_q=ints(0, 5, 10), max_seqlen_q=5)
    keys, values = (x[[0, 3]].flatten(0, 1)[:17] for x in pages)
    assert_same(out[5:], plain(q[1], keys, values, causal=True)[0])


@pytest.mark.parametrize("rotary", [False, True])
@everywhere
def test_qv_over_a_latent_cache(rotary):
    """MLA: 64 rotary channels beside 512 of the latent, which are the values."""
    q, qv, latent = randn(2, 2, 4, 64) / 8, randn(2, 2, 4, 512) / 8, randn(6, 16, 1, 576)
    k_cache, v_cache = latent[..., 512:], latent[..., :512]
    used, options, new = [30, 11], {}, 0
    if rotary:
        new, k, v = 2, randn(2, 2, 1, 64), randn(2, 2, 1, 512)
        angles = rand(64, 32) * 6
        options = {"k": k, "v": v, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    out = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv, cache_seqlens=ints(*used), page_table=ints(*TABLE), causal=True,
                                               **options)
    assert out.shape == (2, 2, 4, 512)
    for b, n in enumerate(used):
        rows = latent[torch.tensor(TABLE[b]).clamp(max=5)].flatten(0, 1)[: n + new]
        turned = q[b]
        if rotary:
            assert torch.equal(rows[n:, :, :512], v[b])
            cos, sin = (x[n : n + 2, None].to(q.dtype) for x in (angles.cos(), angles.sin()))
            turned = torch.cat([q[b, ..., :32] * cos - q[b, ..., 32:] * sin, q[b, ..., 32:] * cos + q[b, ..., :32] * sin], dim=-1)
            near = torch.cat([k[b, ..., :32] * cos - k[b, ..., 32:] * sin, k[b, ..., 32:] * cos + k[b, ..., :32] * sin], dim=-1)
            assert_same(rows[n:, :, 512:], near.double().cpu())
        assert_same(out[b], plain(torch.cat([qv[b], turned], -1), rows, rows[..., :512], causal=True)[0], factor=8)


@pytest.mark.parametrize("odd", [False, True])
@everywhere
def test_qv_beside_q_is_not_copied(odd, monkeypatch):
    """Unless a row does not begin at a multiple of 16 bytes."""
    q, qv, latent = (randn(2, 2, 4, 64 + odd) / 8)[..., odd:], randn(2, 2, 4, 512) / 8, randn(6, 16, 1, 576)
    fields, call = [], attune.attention
    monkeypatch.setattr(attune, "attention", lambda *args, **more: fields.append(more) or call(*args, **more))
    out = flash_attn_3.flash_attn_with_kvcache(q, latent[..., 512:], latent[..., :512], qv=qv, cache_seqlens=ints(30, 11),
                                               page_table=ints(*TABLE), causal=True)
    assert ("q_rope" in fields[0]) == (not odd and q.element_size() == 2)
    for b, n in enumerate([30, 11]):
        rows = latent[torch.tensor(TABLE[b]).clamp(max=5)].flatten(0, 1)[:n]
        assert_same(out[b], plain(torch.cat([qv[b], q[b]], -1), rows, rows[..., :512], causal=True)[0], factor=8)


@everywhere
def test_qv_over_dense_keys():
    q, qv, k, v = randn(2, 5, 4, 16), randn(2, 5, 4, 32), randn(2, 7, 2, 16), randn(2, 7, 2, 32)
    out = flash_attn_3.flash_attn_func(q, k, v, qv=qv, softmax_scale=0.1)
    for b in range(2):
        assert_same(out[b], plain(torch.cat([qv[b], q[b]], -1), torch.cat([v[b], k[b]], -1), v[b], scale=0.1)[0])


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("with_q", [False, True])
@everywhere
def test_descales_of_each_head(with_q):
    """Of a cache's KV heads, and of the queries that read them."""
    q, k_cache, v_cache = randn(2, 2, 4, 32), *(x.to(E4M3) for x in paged(6, 16, 2, 32))
    q_scale, k_scale, v_scale = (rand(1, 2) + 0.5 for _ in range(3))
    codes = q.to(E4M3) if with_q else q
    out = flash_attn_3.flash_attn_with_kvcache(codes, k_cache, v_cache, cache_seqlens=ints(40, 17), page_table=ints(*TABLE), causal=True,
                                               q_descale=q_scale.expand(2, 2), k_descale=k_scale.expand(2, 2), v_descale=v_scale.expand(2, 2))
    assert out.dtype == (torch.bfloat16 if with_q else q.dtype)
    queries = codes.float() * q_scale.repeat_interleave(2, 1)[..., None] if with_q else q
    for b, n in enumerate((40, 17)):
        k, v = (x.float()[torch.tensor(TABLE[b]).clamp(max=5)].flatten(0, 1)[:n] * scale[0, :, None]
                for x, scale in ((k_cache, k_scale), (v_cache, v_scale)))
        bound = 4 * COMPUTE["bfloat16"] if with_q else 4 * COMPUTE[dtype_name(q)]
        torch.testing.assert_close(out[b].double().cpu(), plain(queries[b], k, v, causal=True)[0], rtol=bound, atol=bound)


@everywhere
def test_descales_of_dense_codes():
    q, k, v = (randn(2, n, heads, 32).to(E4M3) for n, heads in ((5, 4), (7, 2), (7, 2)))
    scales = [torch.tensor(x, device=q.device).expand(2, 2) for x in (0.5, 2.0, 1.5)]
    out = flash_attn_3.flash_attn_func(q, k, v, causal=True, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
    assert out.dtype == torch.bfloat16
    for b in range(2):
        want = plain(q[b].float() * 0.5, k[b].float() * 2, v[b].float() * 1.5, causal=True)[0]
        bound = 4 * COMPUTE["bfloat16"] if Here.device == "cpu" else 2**-3
        torch.testing.assert_close(out[b].double().cpu(), want, rtol=bound, atol=bound)


def test_refusals():
    x, codes = torch.randn(2, 4, 2, 16), torch.randn(2, 4, 2, 16).to(E4M3)
    rows = torch.rand(2, 2)
    with_cache, dense = flash_attn_3.flash_attn_with_kvcache, flash_attn_3.flash_attn_func
    for function, arguments, options, message in [
        (dense, (x, x, x), {"attention_chunk": 4}, "flash_attn_func: attention_chunk is 4; 0 is supported"),
        (dense, (codes, codes, codes), {"k_descale": rows}, r"flash_attn_func: k_descale has shape \[2, 2\]; dense keys take one number"),
        (with_cache, (codes, codes, codes), {"v_descale": rows}, r"v_descale has shape \[2, 2\] and a row for each sequence; one for all"),
        (with_cache, (codes, codes, codes, codes, codes), {"cache_seqlens": 1}, "k is given, and q or k is float8_e4m3fn"),
        (with_cache, (x, x, x), {"qv": x}, "qv is given, and k_cache and v_cache are no columns of one cache: rows of 32 that hold v, then k"),
        (with_cache, (x, x, x), {"rotary_seqlens": rows}, "rotary_seqlens is given"),
        (with_cache, (x, x, x), {"cu_seqlens_q": rows}, "cu_seqlens_q goes with a tensor of cache_seqlens"),
        (flash_attn_3.flash_attn_varlen_func, (x, x, x, x, x, 1, 1), {"seqused_q": x}, "seqused_q is given"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            function(*arguments, **options)


def test_names_that_are_near_are_suggested():
    x = torch.randn(1, 4, 2, 16)
    for module in (flash_attn, flash_attn_3):
        for given, message in (("softmax_scal", "flash_attn_func: 'softmax_scal' is not an argument of this operation; did you mean softmax_scale?"),
                               ("attn_mask", "; did you mean attune.sdpa, which has attn_mask?"), ("zzz", "of this operation$")):
            with pytest.raises(TypeError, match=message if given == "zzz" else re.escape(message)):
                module.flash_attn_func(x, x, x, **{given: 1.0})


def test_names_of_the_other_version_are_suggested():
    x = torch.randn(1, 4, 2, 16)
    for module, given, meant in ((flash_attn, "page_table", "block_table"), (flash_attn_3, "block_table", "page_table")):
        with pytest.raises(TypeError, match=f"flash_attn_with_kvcache: '{given}' is not an argument .*; did you mean {meant}[?]"):
            module.flash_attn_with_kvcache(x, x, x, cache_seqlens=4, **{given: ints([0])})
    with pytest.raises(TypeError, match="flash_mla_with_kvcache: 'block_tabel' is not an argument .*; did you mean block_table[?]"):
        flash_mla.flash_mla_with_kvcache(x, x, block_tabel=x)


def test_arguments_of_a_wrong_kind_are_named():
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 6, 2, 16)
    ragged = (q[0], k[0], k[0], ints(0, 4), ints(0, 6))
    for module in (flash_attn, flash_attn_3):
        for function, arguments, options, message in [
            ("flash_attn_func", (q, None, None), {}, "flash_attn_func: k is <class 'NoneType'>; a tensor of torch is expected"),
            ("flash_attn_func", (q, k, None), {}, "flash_attn_func: v is <class 'NoneType'>; a tensor"),
            ("flash_attn_func", (q, k, k), {"window_size": 3}, "window_size is 3; a pair is expected: keys to the left and to the right, -1"),
            ("flash_attn_func", (q, k, k), {"window_size": (1, 2, 3)}, r"window_size is \(1, 2, 3\); a pair is expected"),
            ("flash_attn_varlen_func", (*ragged, None, 6), {}, "flash_attn_varlen_func: max_seqlen_q is None; an int is expected"),
            ("flash_attn_varlen_func", (*ragged, "a", 6), {}, "flash_attn_varlen_func: max_seqlen_q is 'a'; an int is expected"),
            ("flash_attn_func", (q, k, k), {"window_size": ("a", 2)}, r"window_size is \('a', 2\); a pair is expected"),
            ("flash_attn_with_kvcache", (q, k, k), {"cache_seqlens": [6]}, "cache_seqlens is <class 'list'>; a tensor of torch or an int is"),
            ("flash_attn_with_kvcache", (q, k, k), {"cache_seqlens": 6, "cache_leftpad": 1}, "cache_leftpad is <class 'int'>; a tensor of torch"),
        ]:
            with pytest.raises(TypeError, match=message) as raised:
                getattr(module, function)(*arguments, **options)
            assert isinstance(raised.value, attune.WrongType)
        with pytest.raises(attune.InvalidArgument, match="^v is None, and k is given: new tokens have both$"):
            module.flash_attn_with_kvcache(q, k, k, k=q, cache_seqlens=1)
    for slopes, message in ((torch.rand(3), r"alibi_slopes has shape \[3\]; q has 2 heads"), ([0.5, 0.5], "alibi_slopes is <class 'list'>")):
        with pytest.raises((TypeError, ValueError), match=message):
            flash_attn.flash_attn_func(q, k, k, alibi_slopes=slopes)


def test_errors_name_the_arguments_of_these_calls():
    q, pages = torch.randn(1, 4, 2, 16), torch.randn(3, 8, 2, 16)
    for module, table in ((flash_attn, "block_table"), (flash_attn_3, "page_table")):
        with pytest.raises(ValueError, match="^cache_seqlens.dtype is int64"):
            module.flash_attn_with_kvcache(q, pages[:1], pages[:1], cache_seqlens=torch.tensor([6]))
        with pytest.raises(ValueError, match=f"^{table}.dtype is int64"):
            module.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=ints(6), **{table: torch.tensor([[0]])})
        with pytest.raises(ValueError, match="^v_cache has pages of 7 tokens, but k_cache of 8"):
            module.flash_attn_with_kvcache(q, pages[:1], pages[:1, :7], cache_seqlens=ints(6))
        with pytest.raises(ValueError, match=r"^cu_seqlens_k.shape\[0\] is 3; it must be 2"):
            module.flash_attn_varlen_func(q[0], q[0], q[0], ints(0, 4), ints(0, 2, 4), 4, 4)


@everywhere
def test_a_scale_of_zero_weighs_all_keys_alike():
    """In attune 0 stands for the default."""
    q, k, v = randn(2, 5, 4, 16), randn(2, 7, 2, 16), randn(2, 7, 2, 16)
    for module in (flash_attn, flash_attn_3):
        dense = module.flash_attn_func(q, k, v, softmax_scale=0.0)
        ragged = module.flash_attn_varlen_func(q[1], k[1], v[1], ints(0, 5), ints(0, 7), 5, 7, softmax_scale=0.0)
        k_cache, v_cache = torch.cat([k, k[:, :5]], 1), torch.cat([v, v[:, :5]], 1)
        cached = module.flash_attn_with_kvcache(q, k_cache, v_cache, k[:, :5], v[:, :5], cache_seqlens=7, softmax_scale=0.0, causal=True)
        for b in range(2):
            assert_same(dense[b], plain(q[b], k[b], v[b], scale=0)[0])
            assert_same(cached[b], plain(q[b], k_cache[b], v_cache[b], scale=0, causal=True)[0])
        assert_same(ragged, plain(q[1], k[1], v[1], scale=0)[0])
    codes = [x.to(E4M3) for x in (q, k, v)]
    out = flash_attn_3.flash_attn_func(*codes, softmax_scale=0.0)
    want = plain(*(x[0].float() for x in codes), scale=0)[0]
    bound = 4 * COMPUTE["bfloat16"] if Here.device == "cpu" else 2**-3
    torch.testing.assert_close(out[0].double().cpu(), want, rtol=bound, atol=bound)


def test_lengths_that_the_host_knows_are_held_to_the_cache():
    q, cache, angles = torch.randn(1, 4, 2, 16), torch.randn(1, 9, 2, 16), torch.rand(8, 8)
    new = {"k": q, "v": q}
    for module in (flash_attn, flash_attn_3):
        for options, message in [
            ({"cache_seqlens": -1}, "cache_seqlens is -1; 0..9 is allowed"),
            ({"cache_seqlens": 10}, "cache_seqlens is 10; 0..9 is allowed"),
            ({"cache_seqlens": 6, **new}, "cache_seqlens is 6; 0..5 is allowed: the cache has room for 9 tokens, and 4 are new"),
            ({"cache_seqlens": 5, "rotary_cos": angles, "rotary_sin": angles, **new}, "rotary_cos has 8 positions; tokens go up to position 8"),
            ({"cache_seqlens": 4, "rotary_sin": angles, **new}, "rotary_cos is None, and rotary_sin is given"),
            ({"cache_seqlens": 4, "rotary_cos": angles, **new}, "rotary_sin is None, and rotary_cos is given"),
            ({"cache_seqlens": 4, "rotary_sin": angles}, "rotary_sin is given without k and v"),
        ]:
            with pytest.raises(ValueError, match=re.escape(message)):
                module.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), **options)
        module.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), cache_seqlens=4, rotary_cos=angles, rotary_sin=angles, **new)
