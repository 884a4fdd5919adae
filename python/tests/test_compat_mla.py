# SPDX-License-Identifier: Apache-2.0
"""attune.compat.flash_mla against the float64 reference, and on a GPU: in graphs, on other streams, without waiting."""

import math

import numpy as np
import pytest

import attune
from compare import assert_attention, assert_close, dtype_name
from places import TABLE, Here, check, everywhere, exact, expect, ints, needs_gpu, rand, randn, start, torch  # noqa: F401

from attune.compat import flash_mla, flash_mla_2025_09  # noqa: E402


@everywhere
@pytest.mark.parametrize("style", ["2025", "2026"])
def test_mla_dense_decode(style):
    q, k_cache = randn(2, 3, 8, 576), randn(6, 16, 1, 576) / 4
    table, lengths = ints(*TABLE), ints(40, 0)
    module = flash_mla_2025_09 if style == "2025" else flash_mla
    if style == "2025":
        meta, splits = module.get_mla_metadata(lengths, 3 * 8, 1)
        assert meta.dtype == splits.dtype == torch.int32 and splits.shape == (3,) and meta.device == splits.device == q.device
    else:
        meta, splits = module.get_mla_metadata()
        assert splits is None
    for _ in range(2):
        out, lse = module.flash_mla_with_kvcache(q, k_cache, table, lengths, 512, meta, splits, causal=True)
        expected = expect(q, cache=attune.KVCache(k_cache, page_table=table), seqused_kv=lengths, head_dim_v=512, causal=True)
        assert out.shape == (2, 3, 8, 512) and lse.shape == (2, 8, 3)
        assert out.dtype == q.dtype
        check(out, expected, lse, lambda lse: lse.transpose(1, 2))
        lengths.copy_(ints(7, 30))  # the object must not hold what the first call saw
        table[1, 1] = 4


@everywhere
@pytest.mark.parametrize("inference", [False, True])
def test_mla_layers_of_a_step_share_a_schedule(monkeypatch, inference):
    runs = []
    monkeypatch.setattr(attune.Plan, "run", lambda plan, **changes: runs.append(1) or attune._core.Plan.run(plan, **changes))
    with torch.inference_mode(inference):
        q, layers = randn(2, 3, 8, 576), [randn(6, 16, 1, 576) / 4 for _ in range(3)]
        table, lengths = ints(*TABLE), ints(40, 0)
        meta, _ = flash_mla.get_mla_metadata()

        def step(q, lengths, scheduled):
            runs.clear()
            for k_cache in layers:
                out, lse = flash_mla.flash_mla_with_kvcache(q, k_cache, table, lengths, 512, meta, causal=True)
                expected = expect(q, cache=attune.KVCache(k_cache, page_table=table), seqused_kv=lengths, head_dim_v=512, causal=True)
                check(out, expected, lse, lambda lse: lse.transpose(1, 2))
            assert len(runs) == scheduled

        step(q, lengths, 1)
        step(q, lengths, 0)
        step(q[:, 1:], lengths, 1)  # fewer queries, or other lengths: another schedule
        step(q, ints(7, 30), 1)
        if not inference:
            step(q, lengths, 1)
            lengths.copy_(ints(3, 33))
            step(q, lengths, 1)


def quantised(width, pages=4, page_size=16):
    """A cache as FlashMLA's writers make it: float8 dtype, pages padded."""
    d = 576 if width == 656 else 512
    rows = randn(pages * page_size, 1, d)
    if width == 656:
        data = torch.zeros(pages, page_size + 1, 656, dtype=torch.uint8, device=Here.device)[:, :page_size]
        cache = attune.KVCache(data, format="mla_656", layout="bytes")
        view = data.view(torch.float8_e4m3fn).unsqueeze(2)
    else:
        size = attune.kv_page_bytes("mla_584", page_size)
        data = torch.zeros(pages, size, dtype=torch.uint8, device=Here.device)
        cache = attune.KVCache(data, format="mla_584", layout="bytes", page_size=page_size)
        view = data.view(torch.float8_e4m3fn)[:, : page_size * 584].view(pages, page_size, 1, 584)
    attune.cache_quantize(cache, rows)
    return cache, view, d


@pytest.mark.parametrize("width", [656, 584])
@everywhere
def test_mla_sparse_decode_with_sink_lengths_and_extra_cache(width):
    cache, view, d = quantised(width)
    extra, extra_view, _ = quantised(width)
    q = randn(2, 2, 5, d)
    indices, more = (torch.randint(-1, 64, (2, 2, n), dtype=torch.int32).to(q.device) for n in (9, 4))
    sink, length, more_length = rand(5) * 4 - 2, ints(6, 0), ints(4, 0)
    meta, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, view, None, None, 512, meta, None, 0.04, False, True, indices, sink, extra_view, more, length, more_length)
    expected = expect(q, cache=cache, indices=indices, topk_length=length.repeat_interleave(2), sinks=sink, extra_cache=extra,
                      extra_indices=more, extra_topk_length=more_length.repeat_interleave(2), softmax_scale=0.04, head_dim_v=512)
    assert np.isinf(expected.lse[2:]).all()
    check(out, expected, lse, lambda lse: lse.transpose(1, 2))


@pytest.mark.parametrize("kind", ["dense", "sparse", "packed"])
@everywhere
def test_mla_with_a_scale_of_zero_weighs_all_keys_alike(kind):
    """In attune 0 stands for the default."""
    q, lengths = randn(2, 2, 4, 576), ints(40, 7)
    k_cache = randn(6, 16, 1, 576) / 4
    table, fields, options = ints(*TABLE), {}, {}
    if kind == "dense":
        fields = {"cache": attune.KVCache(k_cache, page_table=table), "seqused_kv": lengths, "causal": True}
        arguments = k_cache, table, lengths
        options["causal"] = True
    else:
        cache, view, _ = quantised(656)
        indices = torch.randint(-1, 64, (2, 2, 9), dtype=torch.int32).to(q.device)
        fields = {"cache": cache if kind == "packed" else attune.KVCache(k_cache), "indices": indices}
        arguments = view if kind == "packed" else k_cache, None, None
        options.update(indices=indices, is_fp8_kvcache=kind == "packed")
    meta, _ = flash_mla.get_mla_metadata()
    alike = expect(torch.zeros_like(q), head_dim_v=512, **fields)
    for scale, expected in ((0.1, expect(q, softmax_scale=0.1, head_dim_v=512, **fields)), (0.0, alike), (0, alike),
                            (None, expect(q, head_dim_v=512, **fields))):
        out, lse = flash_mla.flash_mla_with_kvcache(q, *arguments, 512, meta, softmax_scale=scale, **options)
        check(out, expected, lse, lambda lse: lse.transpose(1, 2))


@everywhere
def test_mla_prompts_with_a_scale_of_zero_weigh_all_keys_alike():
    q, kv, indices = randn(5, 4, 576), randn(30, 1, 576), torch.randint(0, 30, (5, 1, 12), dtype=torch.int32).to(Here.device)
    expected = expect(torch.zeros_like(q), kv, indices=indices, head_dim_v=512)
    for module, unit in ((flash_mla, 1), (flash_mla_2025_09, math.log2(math.e))):
        out, max_logits, lse = module.flash_mla_sparse_fwd(q, kv, indices, 0.0)
        check(out, expected, lse / unit)
        assert (max_logits == 0).all()
    q, k, v = randn(9, 4, 48), randn(13, 2, 48), randn(13, 2, 32)
    starts_q, starts_kv = ints(0, 4, 9), ints(0, 3, 13)
    expected = expect(torch.zeros_like(q), k, v, cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv)
    out, lse = flash_mla.flash_attn_varlen_func(q, k, v, starts_q, starts_kv, 5, 10, softmax_scale=0)
    check(out, expected, lse)


def test_gradients_with_a_scale_of_zero():
    q, k, v = (torch.randn(4, 2, 16).requires_grad_() for _ in range(3))
    out, _ = flash_mla.flash_attn_varlen_func(q, k, v, ints(0, 4), ints(0, 4), 4, 4, softmax_scale=0.0)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq == 0).all() and (dk == 0).all()
    torch.testing.assert_close(dv, torch.ones_like(v))


def padded(x):
    """The same, each axis a slice of a longer one, as FlashMLA's own tests have it."""
    wide = torch.full([n + (128 if i == x.dim() - 1 else 1) for i, n in enumerate(x.shape)], 7, dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(0, n) for n in x.shape)]
    view.copy_(x)
    return view


@pytest.mark.parametrize("style", ["2025", "2026"])
@pytest.mark.parametrize("seqlen_q", [1, 2, 3])
@everywhere
def test_mla_sparse_decode_over_padded_arrays(seqlen_q, style):
    cache, view, d = quantised(656)
    extra, extra_view, _ = quantised(656)
    q = randn(3, seqlen_q, 5, d)
    indices, more = (torch.randint(-1, 64, (3, seqlen_q, n), dtype=torch.int32).to(q.device) for n in (9, 4))
    length, more_length = ints(6, 0, 9), ints(4, 1, 3)
    meta = flash_mla.get_mla_metadata()[0] if style == "2026" else flash_mla.get_mla_metadata(length, 5, 1)[0]
    for _ in range(2):
        out, lse = flash_mla.flash_mla_with_kvcache(
            padded(q), view, None, None, 512, meta, None, 0.04, False, True, padded(indices), None, extra_view, padded(more), length,
            more_length)
        expected = expect(q, cache=cache, indices=indices, topk_length=length.repeat_interleave(seqlen_q), extra_cache=extra,
                          extra_indices=more, extra_topk_length=more_length.repeat_interleave(seqlen_q), softmax_scale=0.04,
                          head_dim_v=512)
        check(out, expected, lse, lambda lse: lse.transpose(1, 2))
        indices = indices.flip(0).contiguous()


@everywhere
def test_mla_batch_invariant(monkeypatch):
    asked, plan_of = [], attune.Plan.__init__
    monkeypatch.setattr(attune.Plan, "__init__",
                        lambda plan, q, **fields: asked.append(fields["batch_invariant"]) or plan_of(plan, q, **fields))
    q, k_cache, table, lengths = randn(2, 1, 8, 576), randn(6, 16, 1, 576) / 4, ints(*TABLE), ints(40, 7)
    expected = expect(q, cache=attune.KVCache(k_cache, page_table=table), seqused_kv=lengths, head_dim_v=512)
    for wanted in True, False:
        meta, _ = flash_mla.get_mla_metadata()
        out, _ = flash_mla.flash_mla_with_kvcache(q, k_cache, table, lengths, 512, meta, enable_batch_invariant=wanted)
        check(out, expected)
    assert asked == [True, False]


@pytest.mark.parametrize("module", [flash_mla, flash_mla_2025_09])
@everywhere
def test_mla_sparse_prefill(module):
    q, kv = randn(5, 4, 576), randn(30, 1, 576)
    indices = torch.randint(0, 30, (5, 1, 12), dtype=torch.int32).to(q.device)
    indices[1, 0, 3:], indices[2], indices[3, 0, 0] = -1, 30, 2**31 - 1
    out, max_logits, lse = module.flash_mla_sparse_fwd(q, kv, indices, 0.05)
    expected = expect(q, kv, indices=indices, softmax_scale=0.05, head_dim_v=512)
    check(out, expected)
    factor = 1 if module is flash_mla else math.log2(math.e)
    nothing = np.inf if module is flash_mla else -np.inf
    assert (exact(lse)[2] == nothing).all() and np.isneginf(exact(max_logits)[2]).all()
    seen = [0, 1, 3, 4]
    bound = 1e-4 if Here.dtype == torch.float32 else 2**-7
    assert_close(exact(lse)[seen], expected.lse[seen] * factor, bound, "lse")
    assert_close(exact(max_logits)[seen], expected.max_logits[seen] * factor, bound, "max_logits")


@everywhere
@pytest.mark.parametrize("first", [5, 64])
def test_mla_sparse_prefill_gives_the_lse_of_the_first_indices(first):
    q, kv, sink = randn(4, 4, 576), randn(30, 1, 576), rand(4)
    indices, length = torch.randint(0, 30, (4, 1, 12), dtype=torch.int32).to(q.device), ints(12, 3, 0, 7)
    out, max_logits, lse, lse_first = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05, 512, sink, length, indexer_topk=first)
    plain = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05, 512, sink, length)
    assert all(torch.equal(a, b) for a, b in zip((out, max_logits, lse), plain))
    expected = expect(q, kv, indices=indices[..., :first], topk_length=ints(*(min(n, first) for n in (12, 3, 0, 7))),
                      softmax_scale=0.05, head_dim_v=512)
    assert (exact(lse_first)[2] == np.inf).all()
    seen = [0, 1, 3]
    assert_close(exact(lse_first)[seen], expected.lse[seen], 1e-4 if Here.dtype == torch.float32 else 2**-7, "lse_first")


@everywhere
def test_mla_varlen_forward():
    q, k, v = randn(9, 4, 48), randn(13, 2, 48), randn(13, 2, 32)
    starts_q, starts_kv = ints(0, 4, 9), ints(0, 3, 13)
    out, lse = flash_mla.flash_attn_varlen_func(q, k, v, starts_q, starts_kv, 5, 10, causal=True)
    expected = expect(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_kv=starts_kv, causal=True)
    # -inf in the row before the first key
    assert_attention(exact(out), exact(lse), None, expected, dtype_name(q))
    assert np.isneginf(exact(lse)[0]).all() and lse.stride(0) == 1
    packed = torch.cat([k, v], dim=-1)
    again, _ = flash_mla.flash_attn_varlen_kvpacked_func(q, packed, starts_q, starts_kv, 5, 10, 48, causal=True)
    assert torch.equal(out, again)
    qkv = randn(9, 2, 128)
    one, _ = flash_mla.flash_attn_varlen_qkvpacked_func(qkv, starts_q, 5, 48)
    two, _ = flash_mla.flash_attn_varlen_func(qkv[..., :48], qkv[..., 48:96], qkv[..., 96:], starts_q, starts_q, 5, 5)
    assert torch.equal(one, two)


@everywhere
def test_mla_refusals():
    q, kv = randn(1, 1, 4, 576), randn(2, 16, 1, 576)
    meta, _ = flash_mla.get_mla_metadata()
    call = flash_mla.flash_mla_with_kvcache
    with pytest.raises(ValueError, match="causal is True"):
        call(q, kv, None, None, 512, meta, causal=True, indices=ints(0).view(1, 1, 1))
    with pytest.raises(ValueError, match="topk_length is given without indices"):
        call(q, kv, ints(0, 1).view(1, 2), ints(3), 512, meta, topk_length=ints(1))
    with pytest.raises(ValueError, match=r"k_cache.shape\[3\] is 576; an fp8 cache has 656 or 584"):
        call(q, kv, None, None, 512, meta, is_fp8_kvcache=True, indices=ints(0).view(1, 1, 1))
    packed, one = torch.zeros(2, 16, 1, 656, dtype=torch.uint8, device=q.device), {"indices": ints(0).view(1, 1, 1)}
    with pytest.raises(ValueError, match="k_cache has 3 axes; it must have 4: pages, page_size, num_heads_kv, bytes of a token"):
        call(q, packed[:, :, 0], None, None, 512, meta, is_fp8_kvcache=True, **one)
    with pytest.raises(ValueError, match="k_cache.dtype is torch.bfloat16; an fp8 cache has elements of one byte"):
        call(q, packed.bfloat16(), None, None, 512, meta, is_fp8_kvcache=True, **one)
    for cache in packed[..., :584], packed[..., :584].contiguous():
        with pytest.raises(ValueError, match=r"k_cache.stride\(\) is .*; rows of 584 bytes lie side by side, and pages of 16 of them "
                                             "at least 9792 bytes apart"):
            call(q[..., :512], cache, None, None, 512, meta, is_fp8_kvcache=True, **one)
    with pytest.raises(ValueError, match="cache_seqlens is None; it may be with indices only"):
        call(q, kv, ints(0, 1).view(1, 2), None, 512, meta)
    with pytest.raises(ValueError, match="block_table is None"):
        call(q, kv, None, ints(3), 512, meta)
    with pytest.raises(ValueError, match="q has 3 axes"):
        call(q[0], kv, ints(0, 1).view(1, 2), ints(3), 512, meta)
    for name in "extra_indices_in_kvcache", "extra_topk_length":
        with pytest.raises(ValueError, match=f"{name} is given without extra_k_cache"):
            call(q, kv, None, None, 512, meta, indices=ints(0).view(1, 1, 1), **{name: ints(0).view(1, 1, 1)})
    # In the caller's words.
    with pytest.raises(ValueError, match=r"^block_table.dtype is int64 \(9\); allowed: int32$"):
        call(q, kv, ints(0, 1).view(1, 2).long(), ints(3), 512, meta)
    with pytest.raises(ValueError, match=r"^cache_seqlens.shape\[0\] is 2; it must be 1 \(batch\); cache_seqlens has shape \[2\]$") as caught:
        call(q, kv, ints(0, 1).view(1, 2), ints(3, 3), 512, meta)
    assert type(caught.value) is attune.InvalidArgument and caught.value.status == "invalid argument"
    with pytest.raises(ValueError, match="^extra_k_cache is set, but extra_indices_in_kvcache is absent$"):
        call(q, kv, None, None, 512, meta, indices=ints(0).view(1, 1, 1), extra_k_cache=kv)
    with pytest.raises(ValueError, match=r"^kv.shape\[2\] is 512; it must be 576"):
        flash_mla.flash_mla_sparse_fwd(q[0], kv[0, ..., :512], ints(0).view(1, 1, 1), 1.0)
    call(q, kv, ints(0, 1).view(1, 2), ints(3), 512, meta)
    with pytest.raises(ValueError, match="num_heads_q is 2; the plan was made for 4"):
        call(q[:, :, :2], kv, ints(0, 1).view(1, 2), ints(3), 512, meta)
    with pytest.raises(ValueError, match="indexer_topk is -1"):
        flash_mla.flash_mla_sparse_fwd(q[0], kv[0], ints(0).view(1, 1, 1), 1.0, indexer_topk=-1)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: dropout_p is 0.1"):
        flash_mla.flash_attn_varlen_func(q[0], kv[0], kv[0], ints(0, 1), ints(0, 16), 1, 16, 0.1)



def mla_call(style, quantised_width=None):
    """A call of flash_mla_with_kvcache on tensors that may change in place: (run, change)."""
    Here.device, Here.dtype = "cuda", torch.bfloat16
    module = flash_mla_2025_09 if style == "2025" else flash_mla
    if quantised_width is None:
        q, cache = randn(3, 2, 16, 576), randn(40, 64, 1, 576)
        table, lengths = torch.randint(0, 40, (3, 12), dtype=torch.int32).cuda(), ints(700, 0, 65)
        arguments, metadata = (q, cache, table, lengths, 512), (lengths, 2 * 16, 1)
        options, tables = {"causal": True}, [(lengths, ints(1, 300, 129)), (table, table.flip(0).clone())]
    else:
        _, cache, d = quantised(quantised_width, pages=8)
        q, indices = randn(3, 2, 16, d), torch.randint(-1, 128, (3, 2, 200), dtype=torch.int32).cuda()
        arguments, metadata = (q, cache, None, None, 512), (ints(1, 1, 1), 2 * 16, 1, 16, True, 200)
        options, tables = {"is_fp8_kvcache": True, "indices": indices}, [(indices, indices.flip(0).clone())]
    meta, splits = module.get_mla_metadata(*metadata) if style == "2025" else module.get_mla_metadata()

    def run():
        return module.flash_mla_with_kvcache(*arguments, meta, splits, **options)

    def change():
        q.mul_(-0.5)
        for tensor, value in tables:
            tensor.copy_(value)

    return run, change


CALLS = [(style, width) for style in ("2025", "2026") for width in (None, 656, 584)]


@needs_gpu
@pytest.mark.parametrize("style, width", CALLS)
def test_mla_in_a_cuda_graph(style, width):
    run, change = mla_call(style, width)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [*run(), *run()]  # two layers
    graph.replay()
    before = [x.clone() for x in captured]
    change()
    graph.replay()
    got = [x.clone() for x in captured]
    want = run()
    assert all(torch.equal(a, b) for a, b in zip(got, [*want, *want])) and not torch.equal(before[0], got[0])


@needs_gpu
@pytest.mark.parametrize("width", [None, 656])
def test_mla_with_metadata_made_in_a_capture(width):
    want, _ = mla_call("2026", width)
    want()  # has the kernels loaded
    run, change = mla_call("2026", width)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [*run(), *run()]
    change()
    graph.replay()
    got = [x.clone() for x in captured]
    want = run()
    assert all(torch.equal(a, b) for a, b in zip(got, [*want, *want]))


@needs_gpu
@pytest.mark.parametrize("style, width", CALLS)
def test_mla_does_not_wait_for_the_device(style, width):
    run, _ = mla_call(style, width)
    want = run()
    run()  # leaves its memory to the allocator
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@needs_gpu
@pytest.mark.parametrize("style, width", CALLS)
def test_mla_on_another_stream(style, width):
    run, _ = mla_call(style, width)
    want = run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = run()
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))
