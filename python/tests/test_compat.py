# SPDX-License-Identifier: Apache-2.0
"""The drop-in modules against the float64 reference: argument order, shapes, conventions of lse, refusals. flash_mla's values
are in test_compat_mla.py."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

import attune
import reference
from compare import STORE, assert_close, dtype_name
from places import TABLE, Here, check, everywhere, exact, expect, floats, here, ints, paged, rand, randn, start, torch  # noqa: F401

from attune.compat import flash_attn, flash_mla, flash_mla_2025_09  # noqa: E402
from attune.compat.vllm.prefix_prefill import context_attention_fwd  # noqa: E402
from attune.compat.vllm.triton_unified_attention import unified_attention  # noqa: E402

# ---------------------------------------------------------------------------------------------------------- flash_attn


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (3, 2)}, {"causal": True, "softcap": 2.0, "softmax_scale": 0.3},
    {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.4, 4)}])
@everywhere
def test_flash_attn_func(options):
    q, k, v, options = randn(2, 7, 4, 16), randn(2, 5, 2, 16), randn(2, 5, 2, 16), here(options)
    fields = {name: value for name, value in options.items() if name != "window_size"}
    if "window_size" in options:
        fields["window_left"], fields["window_right"] = options["window_size"]
    expected = expect(q, k, v, **fields)
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert lse.shape == (2, 4, 7) and probabilities is None
    check(out, expected, lse, lse_of=lambda lse: lse.transpose(1, 2))
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, **options))
    assert torch.equal(out, flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), **options))


@everywhere
def test_flash_attn_varlen_and_paged():
    q, k, v = randn(9, 4, 16), randn(13, 2, 16), randn(13, 2, 16)
    starts_q, starts_kv = ints(0, 4, 9), ints(0, 3, 13)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, starts_q, starts_kv, 5, 10, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 9)
    check(out, expect(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv, causal=True), lse, lse_of=lambda lse: lse.T)
    k_pages, v_pages = paged(6, 16, 2, 16)
    lengths = ints(0, 40, 57)
    out = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, starts_q, lengths, 5, 40, causal=True, block_table=ints(*TABLE))
    check(out, expect(q, cu_seqlens_q=starts_q, cache=attune.KVCache(k_pages, v_pages, page_table=ints(*TABLE)),
                      seqused_kv=ints(40, 17), causal=True))
    qkv = randn(9, 3, 4, 16)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, starts_q, 5, causal=True),
                       flash_attn.flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], starts_q, starts_q, 5, 5, causal=True))
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv[None]), flash_attn.flash_attn_func(*qkv[None].unbind(2)))


def turned(x, positions, cos, sin, interleaved):
    """x [batch, tokens, heads, d] in float64, by the tables' rows at positions [batch, tokens]."""
    x, half = x.double().clone(), cos.shape[1]
    c, s = cos.double()[positions][:, :, None], sin.double()[positions][:, :, None]
    a, b = (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    first, second = a * c - b * s, b * c + a * s
    a.copy_(first), b.copy_(second)
    return x


@pytest.mark.parametrize("table", [None, TABLE])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seqlen_q, seqlen_new, causal", [(1, 1, True), (3, 3, True), (3, 3, False), (2, 4, True), (2, 4, False)])
@everywhere
def test_flash_attn_with_kvcache_appends_and_rotates(table, interleaved, seqlen_q, seqlen_new, causal):
    d, rotary = 32, 16
    q = randn(2, seqlen_q, 4, d)
    k, v = randn(2, seqlen_new, 2, d), randn(2, seqlen_new, 2, d)
    shape = (6, 16) if table else (3, 48)
    k_cache, v_cache = paged(*shape, 2, d)
    angles = rand(64, rotary // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    lengths = ints(30, 11)
    rows = None if table else ints(2, 0)
    before = exact(k_cache).copy(), exact(v_cache).copy()
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, lengths, rows, None, None if table is None else ints(*table), causal=causal,
        rotary_interleaved=interleaved, return_softmax_lse=True)

    steps = torch.arange(max(seqlen_q, seqlen_new), device=q.device)
    k_turned = turned(k, lengths.long()[:, None] + steps[:seqlen_new], cos, sin, interleaved)
    q_turned = turned(q, lengths.long()[:, None] + (steps[:seqlen_q] if causal else steps[:seqlen_q] * 0), cos, sin, interleaved)
    k_want, v_want = before
    cache = attune.KVCache(k_want, v_want, page_table=None if table is None else np.array(table), batch_index=exact(rows))
    for b in range(2):
        for t in range(seqlen_new):
            place = reference.locate(cache, b, int(lengths[b]) + t)
            k_want[place], v_want[place] = k_turned[b, t].cpu(), exact(v[b, t])
    rounding = 0 if q.dtype == torch.float32 else STORE[dtype_name(q)]
    assert_close(exact(k_cache), k_want.astype(np.float64), 1e-5 + rounding * np.abs(k_want), "k_cache")
    assert_close(exact(v_cache), v_want.astype(np.float64), 0, "v_cache")
    expected = reference.attention(q_turned.cpu().numpy(), cache=cache, seqused_kv=exact(lengths) + seqlen_new, causal=causal)
    check(out, expected, lse, lse_of=lambda lse: lse.transpose(1, 2))


@everywhere
def test_flash_attn_with_kvcache_reads():
    q = randn(2, 2, 4, 16)
    k_cache, v_cache = paged(2, 9, 2, 16)
    for lengths in (None, 6, ints(9, 0)):
        out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True, window_size=(4, 0))
        used = lengths if isinstance(lengths, torch.Tensor) else ints(*[9 if lengths is None else lengths] * 2)
        check(out, expect(q, cache=attune.KVCache(k_cache, v_cache), seqused_kv=used, causal=True, window_left=4, window_right=0))


def test_rotary_tables_that_change_are_seen():
    cos, sin = torch.ones(8, 4), torch.zeros(8, 4)
    first = flash_attn._cos_sin(cos, sin)
    assert flash_attn._cos_sin(cos, sin) is first
    sin += 1
    assert not torch.equal(flash_attn._cos_sin(cos, sin), first)
    held = len(flash_attn._tables)
    del cos
    assert len(flash_attn._tables) == held - 1


def test_rotary_tables_that_are_made_anew_are_seen():
    for rows in range(8, 72, 4):
        cos, angles = torch.ones(rows, 16), torch.rand(rows, 16)
        sin = angles.sin()
        place = id(sin), sin.data_ptr()
        flash_attn._cos_sin(cos, sin)
        for _ in range(100):
            del sin
            sin = angles.tan()
            if (id(sin), sin.data_ptr()) == place:  # where the one before it was
                break
        assert torch.equal(flash_attn._cos_sin(cos, sin)[:, 16:], sin)


def test_rotary_tables_of_inference_mode():
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 1, 16)
    with torch.inference_mode():
        cos, sin = torch.rand(8, 4), torch.rand(8, 4)
        for _ in range(2):  # also after the tables have changed in place
            sin.mul_(0.5)
            k_cache, v_cache = torch.randn(1, 8, 1, 16), torch.randn(1, 8, 1, 16)
            out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cos, sin, ints(3))
            prologue = attune.Prologue(rope_cos_sin=torch.cat([cos, sin], -1), rope_interleaved=True)
            want = attune.attention(q, k, k, cache=attune.KVCache(k_cache, v_cache), seqused_kv=ints(3), prologue=prologue)
            assert torch.equal(out, want)


def test_flash_attn_compiles_into_one_graph():
    def step(q, k, v, k_cache, v_cache, cos, sin, lengths):
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True,
                                                  return_softmax_lse=True)

    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    caches, angles = paged(2, 9, 2, 16), torch.rand(9, 8)
    others = [x.clone() for x in caches]
    want = step(q, k, v, *caches, angles.cos(), angles.sin(), ints(3, 7))
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v, *others, angles.cos(), angles.sin(), ints(3, 7))
    for a, b in zip((*want, *caches), (*got, *others)):
        assert torch.equal(a, b)


@everywhere
def test_flash_attn_refusals():
    x = randn(1, 4, 2, 16)
    for options, message in (({"dropout_p": 0.1}, "flash_attn_func: dropout_p is 0.1"),
                             ({"alibi_slopes": torch.ones(2, 2)}, r"flash_attn_func: alibi_slopes has shape \[2, 2\] without causal")):
        with pytest.raises(NotImplementedError, match=message):
            flash_attn.flash_attn_func(x, x, x, **options)
    with pytest.raises(ValueError, match="cache_seqlens is None; it must say where k and v go"):
        flash_attn.flash_attn_with_kvcache(x, x, x, x, x)
    with pytest.raises(ValueError, match="cache is given, and q requires grad"):
        flash_attn.flash_attn_with_kvcache(x.requires_grad_(), x, x, cache_seqlens=4)


# ---------------------------------------------------------------------------------------------------------------- vLLM


def x_packed(k, v, x):
    """[pages, page_size, heads, d] twice -> vLLM's layouts."""
    pages, page_size, heads, d = k.shape
    return (k.view(pages, page_size, heads, d // x, x).permute(0, 2, 3, 1, 4).contiguous(),
            v.permute(0, 2, 3, 1).contiguous())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 8, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
                                     {"alibi_slopes": torch.tensor([0.3, 0.1, 0.2, 0.05])}, {"skip_decode": True, "sm_scale": 0.4}])
@everywhere
def test_context_attention_fwd(kv_cache_dtype, options):
    q, k, v = randn(8, 4, 16), randn(8, 2, 16), randn(8, 2, 16)
    k_pages, v_pages = paged(6, 16, 2, 16)
    k_scale, v_scale, options = torch.tensor(0.5, device=q.device), floats(2.0), here(options)
    fields = {}
    if kv_cache_dtype != "auto":
        dtype = torch.float8_e5m2 if "e5m2" in kv_cache_dtype else torch.float8_e4m3fn
        k_pages, v_pages = k_pages.to(dtype).view(torch.uint8), v_pages.to(dtype).view(torch.uint8)
    k_cache, v_cache = x_packed(k_pages, v_pages, 8)
    starts, lengths = ints(0, 1, 8), ints(41, 24)  # 1 and 7 new tokens
    out = torch.full_like(q, 9.0)
    table = torch.tensor(TABLE, device=q.device)
    assert context_attention_fwd(q, k, v, out, kv_cache_dtype, k_cache, v_cache, table, starts, lengths.long(), None, 7, k_scale,
                                 v_scale, **options) is None
    if kv_cache_dtype != "auto":
        k_pages, v_pages = k_pages.view(dtype), v_pages.view(dtype)
        fields = {"k_scale": k_scale[None], "v_scale": v_scale}
    names = {"sm_scale": "softmax_scale", "sliding_window": "window_left"}
    expected = expect(q, k, v, cache=attune.KVCache(k_pages, v_pages, page_table=ints(*TABLE), **fields), cu_seqlens_q=starts,
                      seqused_kv=ints(40, 17), causal=True,
                      **{names.get(name, name): value - 1 if name == "sliding_window" else value for name, value in options.items()})
    check(out, expected)
    if options.get("skip_decode"):
        assert (out[0] == 9).all() and np.isnan(expected.out[0]).all()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@everywhere
def test_context_attention_fwd_of_a_prompt(kv_cache_dtype, monkeypatch):
    """Caches as vLLM makes them, 16 bytes innermost: on CUDA the kernel of prompts takes them."""
    if Here.device == "cuda" and Here.dtype != torch.float32:
        monkeypatch.setenv("ATTUNE_KERNEL", "cuda_prefill")
    q, k, v = randn(41, 4, 64), randn(41, 2, 64), randn(41, 2, 64)
    k_pages, v_pages = paged(6, 16, 2, 64)
    k_scale, v_scale, fields = torch.tensor(0.5, device=q.device), floats(2.0), {}
    if kv_cache_dtype != "auto":
        dtype = torch.float8_e5m2 if "e5m2" in kv_cache_dtype else torch.float8_e4m3fn
        k_pages, v_pages = k_pages.to(dtype), v_pages.to(dtype)
        fields = {"k_scale": k_scale[None], "v_scale": v_scale}
    caches = x_packed(k_pages, v_pages, 16 // k_pages.element_size())
    if kv_cache_dtype != "auto":
        caches = [x.view(torch.uint8) for x in caches]
    starts, out = ints(0, 1, 41), torch.full_like(q, 9.0)
    context_attention_fwd(q, k, v, out, kv_cache_dtype, *caches, ints(*TABLE), starts, ints(41, 57), None, 40, k_scale, v_scale)
    check(out, expect(q, k, v, cache=attune.KVCache(k_pages, v_pages, page_table=ints(*TABLE), **fields), cu_seqlens_q=starts,
                      seqused_kv=ints(40, 17), causal=True))


@everywhere
def test_context_attention_fwd_writes_fp8():
    q, k, v = randn(7, 4, 16), randn(7, 2, 16), randn(7, 2, 16)
    k_pages, v_pages = paged(6, 16, 2, 16)
    out = torch.empty(7, 4, 16, dtype=torch.float8_e4m3fn, device=q.device)
    arguments = (q, k, v, out, "auto", *x_packed(k_pages, v_pages, 4), ints(TABLE[0]), ints(0, 7), ints(24), None, 7, None, None)
    context_attention_fwd(*arguments, fp8_out_scale=floats(0.25))
    expected = expect(q, k, v, cache=attune.KVCache(k_pages, v_pages, page_table=ints(TABLE[0])), seqused_kv=ints(17), causal=True,
                      cu_seqlens_q=ints(0, 7))
    inexact = 0 if q.dtype == torch.float32 else 2**-6
    assert_close(exact(out), expected.out * 4, np.abs(expected.out * 4) * 2**-4 + 2**-9 + 4 * inexact * expected.weight, "out")
    with pytest.raises(NotImplementedError, match="context_attention_fwd: is_block_table_ptr is True"):
        context_attention_fwd(*arguments, is_block_table_ptr=True)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'fp8_inc'"):
        context_attention_fwd(*arguments[:4], "fp8_inc", *arguments[5:])


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"sliding_window": 5, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
                                     {"causal": False, "sliding_window": 5}, {"skip_decode": True}])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("cached", [True, False])
@everywhere
def test_context_attention_fwd_reads_new_tokens_from_the_cache(cached, kv_cache_dtype, options):
    q = randn(8, 4, 16)
    k, v = (None, None) if cached else (randn(8, 2, 16), randn(8, 2, 16))
    k_pages, v_pages = paged(6, 16, 2, 16)
    k_scale, v_scale, options, fields = floats(0.5), floats(2.0), here(options), {}
    if kv_cache_dtype != "auto":
        k_pages, v_pages = k_pages.to(torch.float8_e4m3fn), v_pages.to(torch.float8_e4m3fn)
        fields = {"k_scale": k_scale, "v_scale": v_scale}
    starts, lengths = ints(0, 1, 8), ints(41, 24)
    out = torch.full_like(q, 9.0)
    context_attention_fwd(q, k, v, out, kv_cache_dtype, *x_packed(k_pages, v_pages, 8), ints(*TABLE), starts, lengths, None, 7, k_scale,
                          v_scale, **options)
    names = {"causal": True, **options}
    if "sliding_window" in names:
        names["window_left"] = names.pop("sliding_window") - 1
    expected = expect(q, k, v, cache=attune.KVCache(k_pages, v_pages, page_table=ints(*TABLE), **fields), cu_seqlens_q=starts,
                      seqused_kv=lengths if cached else ints(40, 17), **names)
    check(out, expected)


def interleaved(v, x):
    """[pages, page_size, heads, d] -> the memory of [pages, heads, page_size / x, d, x], called [pages, heads, d, page_size]."""
    pages, page_size, heads, d = v.shape
    return v.view(pages, page_size // x, x, heads, d).permute(0, 3, 1, 4, 2).contiguous().view(pages, heads, d, page_size)


@pytest.mark.parametrize("kv_cache_dtype, x", [("auto", 8), ("auto", 2), ("fp8", 16)])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("one_allocation, max_seq_len", [(True, None), (False, 41)])
@everywhere
def test_context_attention_fwd_over_interleaved_v(one_allocation, max_seq_len, cached, kv_cache_dtype, x):
    q = randn(8, 4, 32)
    k, v = (None, None) if cached else (randn(8, 2, 32), randn(8, 2, 32))
    k_pages, v_pages = paged(6, 16, 2, 32)
    k_scale, v_scale, fields = floats(0.5), floats(2.0), {}
    if kv_cache_dtype != "auto":
        k_pages, v_pages = (t.to(torch.float8_e4m3fn) for t in (k_pages, v_pages))
        fields = {"k_scale": k_scale, "v_scale": v_scale}
    k_cache = x_packed(k_pages, v_pages, 16 // k_pages.element_size())[0]
    v_cache = interleaved(v_pages.view(torch.uint8) if fields else v_pages, x)
    if fields:
        k_cache = k_cache.view(torch.uint8)
    if one_allocation:  # as vLLM has them, [pages, 2, ...]
        both = torch.stack([k_cache.flatten(1), v_cache.flatten(1)], dim=1)
        k_cache, v_cache = both[:, 0].view(k_cache.shape), both[:, 1].view(v_cache.shape)
    starts, lengths = ints(0, 1, 8), ints(41, 24)
    out, table = torch.full_like(q, 9.0), ints(*TABLE)
    table[1, -1] = 77  # beyond the last token: never looked at
    context_attention_fwd(q, k, v, out, kv_cache_dtype, k_cache, v_cache, table, starts, lengths, max_seq_len, 7, k_scale, v_scale,
                          interleaved_v_pack_factor=x)
    check(out, expect(q, k, v, cache=attune.KVCache(k_pages, v_pages, page_table=ints(*TABLE), **fields), cu_seqlens_q=starts,
                      seqused_kv=lengths if cached else ints(40, 17), causal=True))
    # A page that is not there hides its tokens.
    if cached:
        table[0, 0] = 6
        context_attention_fwd(q, k, v, out, kv_cache_dtype, k_cache, v_cache, table, starts, lengths, max_seq_len, 7, k_scale, v_scale,
                              interleaved_v_pack_factor=x)
        check(out[:1], expect(q[:1], cache=attune.KVCache(k_pages, v_pages, page_table=ints(TABLE[0][1:]), **fields), seqused_kv=ints(25),
                              causal=True))


@everywhere
def test_context_attention_fwd_refusals():
    q, k = randn(7, 4, 16), randn(7, 2, 16)
    caches = x_packed(*paged(6, 16, 2, 16), 8)

    def call(k, v, **options):
        context_attention_fwd(q, k, v, q.clone(), "auto", *caches, ints(TABLE[0]), ints(0, 7), ints(24), None, 7, None, None, **options)

    for one, message in (((None, k), "^k is None and v is not; without both"), ((k, None), "^v is None and k is not; without both")):
        with pytest.raises(ValueError, match=message):
            call(*one)
    for factor in 3, -8, 32:
        with pytest.raises(ValueError, match=f"interleaved_v_pack_factor is {factor}; it must divide the 16 tokens of a page"):
            call(k, k, interleaved_v_pack_factor=factor)
    with pytest.raises(NotImplementedError, match="context_attention_fwd: alibi_slopes without causal"):
        call(k, k, alibi_slopes=torch.ones(4), causal=False)
    with pytest.raises(TypeError, match="context_attention_fwd: 'softcap' is not an argument of this operation"):
        call(k, k, softcap=3.0)
    with pytest.raises(ValueError, match=f"k_cache.dtype is {q.dtype}; with kv_cache_dtype 'fp8_e5m2' it has elements of one byte"):
        context_attention_fwd(q, k, k, q.clone(), "fp8_e5m2", *caches, ints(TABLE[0]), ints(0, 7), ints(24), None, 7, None, None)
    codes = [x.to(torch.float8_e4m3fn) for x in caches]
    with pytest.raises(TypeError, match="k_scale is None; kv_cache_dtype 'fp8' needs a scale"):
        context_attention_fwd(q, k, k, q.clone(), "fp8", *codes, ints(TABLE[0]), ints(0, 7), ints(24), None, 7, None, None)


def unified(q, k, v, out, starts, lengths, table, *, window=(-1, -1), softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
            causal=True, **options):
    return unified_attention(q, k, v, out, starts, 7, lengths, 64, 0.25, causal, window, table, softcap, q_descale, k_descale,
                             v_descale, **options)


@pytest.mark.parametrize("options, fields", [
    ({}, {}),
    ({"window": (5, 0), "softcap": 2.0}, {"window_left": 5, "softcap": 2.0}),
    ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "alibi_slopes": torch.tensor([0.3, 0.1, 0.2, 0.05])},) * 2,
    ({"alibi_slopes": torch.tensor([0.3, 0.1, 0.2, 0.05]), "use_alibi_sqrt": True},
     {"alibi_slopes": torch.tensor([0.3, 0.1, 0.2, 0.05]), "alibi_sqrt": True}),
    ({"qq_bias": torch.linspace(-2, 2, 49).view(7, 7)}, {"new_token_bias": torch.linspace(-2, 2, 49).view(7, 7)}),
    ({"mm_prefix_range": torch.tensor([[[2, 39]], [[18, 22]]]), "window": (3, 0)},
     {"bidirectional_ranges": torch.tensor([[[2, 39]], [[18, 22]]]), "window_left": 3}),
])
@everywhere
def test_unified_attention(options, fields):
    q = randn(8, 4, 16)
    out, options, fields = torch.full_like(q, 9.0), here(options), here(fields)
    k, v = paged(6, 16, 2, 16)
    starts, lengths = ints(0, 1, 8), ints(40, 24)
    assert unified(q, k, v, out, starts, lengths, ints(*TABLE), **options) is None
    check(out, expect(q, cache=attune.KVCache(k, v, page_table=ints(*TABLE)), cu_seqlens_q=starts, seqused_kv=lengths, causal=True,
                      softmax_scale=0.25, **fields))


@pytest.mark.parametrize("mode", [1, 2, 3])
@everywhere
def test_unified_attention_over_eight_bits(mode):
    q = randn(8, 4, 16)
    out = torch.empty_like(q)
    k, v = paged(6, 16, 2, 16)
    starts, lengths, table = ints(0, 1, 8), ints(40, 24), ints(*TABLE)
    if mode == 2:
        k, v = (x.mul(40).clamp(-127, 127).to(torch.int8) for x in (k, v))
    else:
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    if mode == 1:  # as vLLM has it: one scale, expanded
        options = {"k_descale": torch.tensor(0.5, device=q.device).expand(2, 2), "v_descale": floats(2.0).expand(2, 2)}
        scales = {"k_scale": floats(0.5), "v_scale": floats(2.0)}
    else:
        scales = {"k_scale": rand(6, 16, 2) / 20, "v_scale": rand(6, 16, 2) / 20}
        options = {"k_scale_cache": scales["k_scale"], "v_scale_cache": scales["v_scale"]}
    unified(q, k, v, out, starts, lengths, table, kv_quant_mode=mode, **options)
    check(out, expect(q, cache=attune.KVCache(k, v, page_table=table, **scales), cu_seqlens_q=starts, seqused_kv=lengths, causal=True,
                      softmax_scale=0.25))


@everywhere
def test_unified_attention_refusals():
    q, k = randn(8, 4, 16), randn(6, 16, 2, 16)
    for options, message in (({"causal": False}, "causal is False"), ({"q_descale": torch.ones(1)}, "q_descale is given"),
                             ({"kv_quant_mode": 4}, "kv_quant_mode is 4"), ({"chunk_lookback": 1}, "chunk_lookback is 1"),
                             ({"causal": torch.ones(2, dtype=torch.bool)}, "causal is a tensor"),
                             ({"rswa_window": 4}, "rswa_window is given"),
                             ({"mm_prefix_clamp_sliding_window": True}, "mm_prefix_clamp_sliding_window is given")):
        with pytest.raises(NotImplementedError, match="unified_attention: " + message):
            unified(q, k, k, q.clone(), ints(0, 1, 8), ints(40, 24), ints(*TABLE), **options)
    for out, options, message in ((None, {}, "^unified_attention: out is None; a tensor of torch is expected"),
                                  (q.clone(), {"window": 3}, "window_size is 3; a pair is expected")):
        with pytest.raises(attune.WrongType, match=message):
            unified(q, k, k, out, ints(0, 1, 8), ints(40, 24), ints(*TABLE), **options)
    with pytest.raises(ValueError, match="kv_quant_mode is 3; it needs k_scale_cache"):
        unified(q, k, k, q.clone(), ints(0, 1, 8), ints(40, 24), ints(*TABLE), kv_quant_mode=3)


@everywhere
def test_operators_with_a_scale_of_zero_weigh_all_keys_alike():
    """In attune 0 stands for the default."""
    q, k, v = randn(8, 4, 16), randn(8, 2, 16), randn(8, 2, 16)
    k_pages, v_pages = paged(6, 16, 2, 16)
    fields = {"cache": attune.KVCache(k_pages, v_pages, page_table=ints(*TABLE)), "cu_seqlens_q": ints(0, 1, 8), "causal": True}
    for scale in 0.0, 0:
        out = torch.full_like(q, 9.0)
        unified_attention(q, k_pages, v_pages, out, ints(0, 1, 8), 7, ints(40, 24), 64, scale, True, (-1, -1), ints(*TABLE), 0.0, None, None,
                          None)
        check(out, expect(torch.zeros_like(q), seqused_kv=ints(40, 24), **fields))
        context_attention_fwd(q, k, v, out, "auto", *x_packed(k_pages, v_pages, 8), ints(*TABLE), ints(0, 1, 8), ints(41, 24), None, 7, None,
                              None, sm_scale=scale)
        check(out, expect(torch.zeros_like(q), k, v, seqused_kv=ints(40, 17), **fields))


# -------------------------------------------------------------------------------------------------- names and positions


@pytest.mark.parametrize("function, names", [
    (flash_mla.flash_mla_with_kvcache,
     "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal is_fp8_kvcache indices "
     "attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length enable_batch_invariant"),
    (flash_mla.flash_mla_sparse_fwd, "q kv indices sm_scale d_v attn_sink topk_length indexer_topk"),
    (flash_mla_2025_09.flash_mla_sparse_fwd, "q kv indices sm_scale d_v"),
    (flash_mla.flash_attn_varlen_func,
     "q k v cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv dropout_p softmax_scale causal deterministic is_varlen"),
    (flash_attn.flash_attn_func,
     "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"),
    (flash_attn.flash_attn_varlen_func,
     "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap alibi_slopes "
     "deterministic return_attn_probs block_table"),
    (flash_attn.flash_attn_with_kvcache,
     "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal "
     "window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"),
    (context_attention_fwd,
     "q k v o kv_cache_dtype k_cache v_cache b_loc b_start_loc b_seq_len max_seq_len max_input_len k_scale v_scale alibi_slopes "
     "sliding_window sm_scale skip_decode fp8_out_scale sinks is_block_table_ptr interleaved_v_pack_factor causal"),
    (unified_attention,
     "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap q_descale "
     "k_descale v_descale seq_threshold_3D num_par_softmax_segments softmax_segm_output softmax_segm_max softmax_segm_expsum "
     "alibi_slopes output_scale qq_bias sinks mm_prefix_range use_alibi_sqrt kv_quant_mode k_scale_cache v_scale_cache "
     "chunk_lookback use_td others"),
])
def test_argument_order(function, names):
    assert list(inspect.signature(function).parameters) == names.split()


@pytest.mark.parametrize("module", ["flash_attn", "flash_attn.flash_attn_interface"])
def test_alias_of_a_module(module):
    code = ("import sys, attune.compat.flash_attn as shim; sys.modules['flash_attn'] = shim\n"
            f"import torch; from {module} import flash_attn_func; x = torch.ones(1, 2, 1, 8)\n"
            "assert torch.equal(flash_attn_func(x, x, x), x)")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("shim", ["flash_mla", "flash_mla_2025_09"])
def test_alias_of_flash_mla(shim):
    code = (f"import sys, attune.compat.{shim} as shim; sys.modules['flash_mla'] = shim\n"
            "import flash_mla.flash_mla_interface as interface\n"
            "assert all(getattr(interface, name) is getattr(shim, name) for name in shim.__all__)")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_positions_of_older_revisions_are_not_taken_for_something_else():
    q, k = randn(8, 4, 16), randn(6, 16, 2, 16)
    arguments = q, k, k, q.clone(), ints(0, 1, 8), 7, ints(40, 24), 64, 0.25, True, (-1, -1), ints(*TABLE), 0.0, None, None, None
    unified_attention(*arguments, use_td=False, rswa_window=None, mm_prefix_clamp_sliding_window=False)
    with pytest.raises(TypeError, match="seq_threshold_3D is a tensor"):
        unified_attention(*arguments, torch.ones(4))
