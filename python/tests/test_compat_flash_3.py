# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's calls beside attention itself: packed inputs, partial results, metadata of the scheduler."""

import inspect

import pytest

from places import TABLE, Here, everywhere, ints, paged, rand, randn, start, torch  # noqa: F401

from attune.compat import flash_attn_interface as flash_attn_3
from plain import assert_same, plain

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("function, names", [
    (flash_attn_3.flash_attn_func,
     "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic "
     "sm_margin return_attn_probs"),
    (flash_attn_3.flash_attn_varlen_func,
     "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv q_descale k_descale v_descale "
     "window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs"),
    (flash_attn_3.flash_attn_with_kvcache,
     "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new "
     "max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size attention_chunk softcap "
     "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"),
    (flash_attn_3.flash_attn_qkvpacked_func,
     "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk softcap deterministic num_heads_q sm_margin "
     "return_attn_probs"),
    (flash_attn_3.flash_attn_combine, "out_partial lse_partial out out_dtype"),
    (flash_attn_3.get_scheduler_metadata,
     "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype headdim_v cu_seqlens_q "
     "cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size attention_chunk has_softcap num_splits pack_gqa "
     "sm_margin"),
])
def test_argument_order(function, names):
    assert list(inspect.signature(function).parameters) == names.split()


@everywhere
def test_packed_qkv_of_version_3():
    """All heads alike, stacked; or fewer heads of k and v, side by side."""
    stacked, beside = randn(2, 5, 3, 4, 16), randn(2, 5, 8, 16)
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "return_attn_probs": True}
    for (q, k, v), (out, lse) in ((stacked.unbind(2), flash_attn_3.flash_attn_qkvpacked_func(stacked, **options)),
                                  ((beside[:, :, :4], beside[:, :, 4:6], beside[:, :, 6:]),
                                   flash_attn_3.flash_attn_qkvpacked_func(beside, num_heads_q=4, **options))):
        for b in range(2):
            want, want_lse = plain(q[b], k[b], v[b], scale=0.3, causal=True, window=(3, 0))
            assert_same(out[b], want)
            assert_same(lse[b], want_lse, factor=16)
    codes, scales = stacked.to(E4M3), [torch.tensor([[x]], device=stacked.device) for x in (0.5, 2.0, 1.5)]
    out = flash_attn_3.flash_attn_qkvpacked_func(codes, None, False, *scales)
    assert torch.equal(out, flash_attn_3.flash_attn_func(*codes.unbind(2), q_descale=scales[0], k_descale=scales[1], v_descale=scales[2]))


def test_packed_qkv_has_gradients():
    stacked, beside = torch.randn(1, 6, 3, 2, 16).requires_grad_(), torch.randn(1, 6, 4, 16).requires_grad_()
    for packed, (q, k, v), options in ((stacked, stacked.unbind(2), {}),
                                       (beside, (beside[:, :, :2], beside[:, :, 2:3], beside[:, :, 3:]), {"num_heads_q": 2})):
        out = flash_attn_3.flash_attn_qkvpacked_func(packed, causal=True, **options)
        want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), packed)[0], torch.autograd.grad(want.square().sum(), packed)[0],
                                   rtol=1e-4, atol=1e-4)


def test_packed_qkv_of_a_wrong_shape_is_named():
    packed = flash_attn_3.flash_attn_qkvpacked_func
    for shape, heads, message in [((1, 6, 2, 2, 16), None, r"qkv has shape \[1, 6, 2, 2, 16\]; \[batch, seqlen, 3, num_heads, d\] is expected"),
                                  ((6, 4, 16), None, r"qkv has shape \[6, 4, 16\]; \[batch, seqlen, 3"),
                                  ((1, 6, 4, 16), None, "num_heads_q is None, and qkv has 4 axes: it must say how many of its 4 heads are q's"),
                                  ((1, 6, 6, 16), 3, "num_heads_q is 3, and qkv has 6 heads: those left are as many of k as of v, at least one"),
                                  ((1, 6, 4, 16), 4, "num_heads_q is 4, and qkv has 4 heads"), ((1, 6, 4, 16), 0, "num_heads_q is 0"),
                                  ((1, 6, 3, 2, 16), 4, "num_heads_q is 4, and qkv has 2 heads of q")]:
        with pytest.raises(ValueError, match="flash_attn_qkvpacked_func: " + message):
            packed(torch.randn(shape), num_heads_q=heads)
    with pytest.raises(NotImplementedError, match="flash_attn_qkvpacked_func: attention_chunk is 2"):
        packed(torch.randn(1, 6, 3, 2, 16), attention_chunk=2)


def merged(partial, lse):
    """(out, lse) in float64; a part whose lse is -inf has no say, whatever its values."""
    partial, lse = partial.double().cpu(), lse.double().cpu()
    whole = lse.logsumexp(0)
    weight = (lse - whole).exp().nan_to_num()[..., None]
    return torch.where(weight > 0, partial * weight, 0).sum(0), whole


@everywhere
def test_combine():
    partial, lse = torch.randn(3, 2, 5, 4, 16, device=Here.device), rand(3, 2, 5, 4) * 8 - 4
    lse[0, 0, 1], partial[0, 0, 1] = -torch.inf, torch.nan
    lse[:, 1, 2, 3], partial[:, 1, 2, 3] = -torch.inf, torch.nan  # of a row that sees nothing
    want, want_lse = merged(partial, lse)
    assert (want[1, 2, 3] == 0).all() and want_lse[1, 2, 3] == -torch.inf and torch.isfinite(want).all()
    for out_dtype, bound in ((None, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        out, out_lse = flash_attn_3.flash_attn_combine(partial, lse, out_dtype=out_dtype)
        assert out.dtype == (out_dtype or torch.float32) and out_lse.dtype == torch.float32
        torch.testing.assert_close(out.double().cpu(), want, rtol=bound, atol=1e-6)
        torch.testing.assert_close(out_lse.double().cpu(), want_lse, rtol=1e-6, atol=1e-6)
    # Heads before rows in memory, as attention leaves its lse; outputs with gaps; one split; tokens of all sequences.
    given = torch.full((2, 9, 4, 16), 9.0, device=Here.device)[:, :5]
    out, out_lse = flash_attn_3.flash_attn_combine(partial.transpose(2, 3).contiguous().transpose(2, 3),
                                                   lse.transpose(2, 3).contiguous().transpose(2, 3), given)
    assert out is given
    torch.testing.assert_close(given.double().cpu(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out_lse.double().cpu(), want_lse, rtol=1e-6, atol=1e-6)
    one, one_lse = flash_attn_3.flash_attn_combine(partial[2:], lse[2:])
    assert torch.equal(one_lse[0], lse[2, 0]) and torch.allclose(one[0], partial[2, 0])
    ragged, ragged_lse = flash_attn_3.flash_attn_combine(partial[:, 1], lse[:, 1])
    assert torch.equal(ragged, out[1]) and torch.equal(ragged_lse, out_lse[1])


@everywhere
def test_combine_of_two_halves_is_the_whole():
    q, k, v = randn(2, 5, 4, 16), randn(2, 12, 2, 16), randn(2, 12, 2, 16)
    halves = [flash_attn_3.flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True) for part in (slice(7), slice(7, 12))]
    out, lse = flash_attn_3.flash_attn_combine(torch.stack([out.float() for out, _ in halves]),
                                               torch.stack([lse.transpose(1, 2) for _, lse in halves]), out_dtype=q.dtype)
    for b in range(2):
        want, want_lse = plain(q[b], k[b], v[b])
        assert_same(out[b], want)
        assert_same(lse[b].transpose(0, 1), want_lse, factor=16)


def test_combine_names_what_is_wrong():
    partial, lse = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)
    for arguments, options, message in [
        ((partial, lse.transpose(2, 3)), {}, r"lse_partial has shape \[3, 2, 4, 5\]; \[3, 2, 5, 4\] is expected, .* of out_partial"),
        ((partial[0, 0, 0], lse[0, 0, 0]), {}, r"out_partial has shape \[4, 16\]; \[num_splits, batch, seqlen, num_heads, d\] is expected"),
        ((partial, lse), {"out": partial}, r"out has shape \[3, 2, 5, 4, 16\]; \[2, 5, 4, 16\] is expected"),
        ((partial, lse), {"out": partial[0], "out_dtype": torch.bfloat16}, "out_dtype is torch.bfloat16, and out is torch.float32"),
    ]:
        with pytest.raises(ValueError, match="flash_attn_combine: " + message):
            flash_attn_3.flash_attn_combine(*arguments, **options)
    with pytest.raises(ValueError, match="^lse_partial.dtype is float16 .*; allowed: float32"):
        flash_attn_3.flash_attn_combine(partial, lse.half())
    with pytest.raises(ValueError, match=r"^out_partial requires grad, .*, or pass out_partial.detach\(\)"):
        flash_attn_3.flash_attn_combine(partial.requires_grad_(), lse)
    with pytest.raises(TypeError, match="flash_attn_combine: lse_partial is <class 'NoneType'>; a tensor of torch is expected"):
        flash_attn_3.flash_attn_combine(partial, None)


@everywhere
def test_scheduler_metadata_goes_with_its_calls():
    q, lengths, table = randn(2, 3, 4, 16), ints(40, 17), ints(*TABLE)
    k_cache, v_cache = paged(6, 16, 2, 32)
    k_cache = k_cache[..., :16].contiguous()
    metadata = flash_attn_3.get_scheduler_metadata(2, 3, 48, 4, 2, 16, lengths, q.dtype, headdim_v=32, page_size=16, causal=True)
    assert metadata.dtype == torch.int32 and metadata.device == q.device and metadata.dim() == 1
    buffer = torch.zeros(64, dtype=torch.int32, device=q.device)
    buffer[: len(metadata)] = metadata  # as engines keep it for graphs
    want = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, page_table=table, causal=True)
    for b, n in enumerate((40, 17)):
        keys, values = (x[torch.tensor(TABLE[b]).clamp(max=5)].flatten(0, 1)[:n] for x in (k_cache, v_cache))
        assert_same(want[b], plain(q[b], keys, values, causal=True)[0])
    for one in (metadata, metadata.clone(), buffer[: len(metadata)], None):
        out = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, page_table=table, causal=True,
                                                   scheduler_metadata=one, num_splits=2)
        assert torch.equal(out, want)
    # Of ragged queries, and fewer of them than the most that it was made for.
    ragged = flash_attn_3.get_scheduler_metadata(2, 5, 48, 4, 2, 16, lengths, headdim_v=32, cu_seqlens_q=ints(0, 3, 6), window_size=(-1, -1))
    out = flash_attn_3.flash_attn_with_kvcache(q.flatten(0, 1), k_cache, v_cache, cache_seqlens=lengths, page_table=table, causal=True,
                                               cu_seqlens_q=ints(0, 3, 6), max_seqlen_q=3, scheduler_metadata=ragged)
    assert torch.equal(out.view_as(want), want)


def test_scheduler_metadata_of_another_batch_is_refused():
    q, cache, lengths = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 2, 16), ints(9, 4)
    pages, table = torch.randn(6, 16, 2, 16), ints(*TABLE)

    def made(batch=2, queries=3, heads=4, heads_kv=2, d=16, **options):
        return flash_attn_3.get_scheduler_metadata(batch, queries, 9, heads, heads_kv, d, ints(*[4] * batch), **options)

    def call(metadata, q=q, k_cache=cache, v_cache=cache, **options):
        flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, scheduler_metadata=metadata, **options)

    call(made())
    call(made(page_size=8))  # over a cache without pages
    call(made(page_size=16), k_cache=pages, v_cache=pages, page_table=table)
    for metadata, options, message in [
        (made(batch=3), {}, "batch_size is 2; scheduler_metadata was made for 3$"),
        (made(queries=2), {}, "max_seqlen_q is 3; scheduler_metadata was made for at most 2$"),
        (made(heads=2), {}, "num_heads_q is 4; scheduler_metadata was made for 2$"),
        (made(heads_kv=1), {}, "num_heads_kv is 2; scheduler_metadata was made for 1$"),
        (made(d=32), {}, "headdim is 16; scheduler_metadata was made for 32$"),
        (made(headdim_v=32), {}, "headdim_v is 16; scheduler_metadata was made for 32$"),
        (made(page_size=8), {"k_cache": pages, "v_cache": pages, "page_table": table},
         "page_size is 16; scheduler_metadata was made for 8$"),
        (made(), {"q": q.flatten(0, 1)[:5], "cu_seqlens_q": ints(0, 5)}, "batch_size is 1; scheduler_metadata was made for 2$"),
        (made(), {"q": q.flatten(0, 1), "cu_seqlens_q": ints(0, 2, 6), "max_seqlen_q": 4}, "max_seqlen_q is 4; scheduler_metadata was made for at most 3$"),
    ]:
        with pytest.raises(ValueError, match=f"flash_attn_with_kvcache: {message}"):
            call(metadata, **options)
    with pytest.raises(TypeError, match="scheduler_metadata is <class 'list'>; a tensor of torch is expected"):
        call([1])
    with pytest.raises(TypeError, match="scheduler_metadata is torch.float32; what get_scheduler_metadata returns is int32"):
        call(torch.zeros(3))


def test_scheduler_metadata_refusals():
    make, lengths = flash_attn_3.get_scheduler_metadata, ints(4, 4)
    for arguments, options, kind, message in [
        ((3, 1, 9, 4, 2, 16, lengths), {}, ValueError, r"cache_seqlens has shape \[2\]; \[3\] is expected"),
        ((2, 1, 9, 4, 2, 16, lengths.long()), {}, ValueError, "cache_seqlens is torch.int64; int32 is expected"),
        ((2, 1, 9, 4, 2, 16, lengths), {"cu_seqlens_q": ints(0, 1)}, ValueError, r"cu_seqlens_q has shape \[2\]; \[3\] is expected"),
        ((2, 1, 9, 4, 3, 16, lengths), {}, ValueError, "num_heads_q is 4; a multiple of num_heads_kv, 3, is expected"),
        ((2, 1, 9, 4, 2, 0, lengths), {}, ValueError, "headdim is 0; 1"),
        ((2, 1, 9, 4, 2, 16, lengths), {"page_size": 0}, ValueError, "page_size is 0; 1"),
        ((2, 1, 9, 4, 2, 16, [4, 4]), {}, TypeError, "cache_seqlens is <class 'list'>; a tensor of torch is expected"),
        ((2, 1, 9, 4, 2, 16, None), {}, TypeError, "cache_seqlens is <class 'NoneType'>; a tensor of torch is expected"),
        ((2, "1", 9, 4, 2, 16, lengths), {}, TypeError, "max_seqlen_q is '1'; an int is expected"),
        ((2, 1, 9, 4, 2, 16, lengths), {"attention_chunk": 4}, NotImplementedError, "attention_chunk is 4; 0 is supported"),
        ((2, 1, 9, 4, 2, 16, lengths), {"cu_seqlens_k_new": ints(0, 1, 2)}, NotImplementedError, "cu_seqlens_k_new is given"),
        ((2, 1, 9, 4, 2, 16, lengths), {"head_dim_v": 8}, TypeError, "'head_dim_v' is not an argument .*; did you mean headdim_v[?]"),
    ]:
        with pytest.raises(kind, match="get_scheduler_metadata: " + message):
            make(*arguments, **options)


def test_scheduler_metadata_compiles_into_one_graph():
    q, cache, lengths = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 2, 16), ints(9, 4)
    metadata = flash_attn_3.get_scheduler_metadata(2, 1, 9, 4, 2, 16, lengths)

    def step(q, lengths, metadata):
        return flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, scheduler_metadata=metadata)

    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(q, lengths, metadata), step(q, lengths, metadata))
