# SPDX-License-Identifier: Apache-2.0
"""The drop-in modules against the float64 reference: argument order, shapes, conventions of lse, refusals. Values are tested on
the CPU, and on the first GPU where there is one."""

import functools
import inspect
import math

import numpy as np
import pytest

import attune
import reference
from compare import STORE, assert_attention, assert_close, dtype_name

torch = pytest.importorskip("torch", reason="torch is not installed: attune.compat is not tested")

from attune.compat import flash_attn, flash_mla, flash_mla_2025_09  # noqa: E402
from attune.compat.vllm.prefix_prefill import context_attention_fwd  # noqa: E402
from attune.compat.vllm.triton_unified_attention import unified_attention  # noqa: E402


class Here:
    """Where the tensors of a test are, and the dtype of those that are neither tables nor parameters."""

    device, dtype = "cpu", torch.float32


DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
PLACES = [(device, dtype) for device in DEVICES for dtype in (torch.float32, torch.bfloat16)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    Here.device, Here.dtype = "cpu", torch.float32
    yield
    Here.device, Here.dtype = "cpu", torch.float32


def everywhere(test):
    """Runs it with tensors of each place. Kernels of CUDA need not take float32."""

    @functools.wraps(test)
    def run(*arguments, place, **options):
        Here.device, Here.dtype = place
        try:
            test(*arguments, **options)
        except attune.Unsupported as reason:
            if place != ("cuda", torch.float32):
                raise
            pytest.skip(str(reason))

    signature = inspect.signature(test)
    place = inspect.Parameter("place", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), place])
    names = [f"{device}-{dtype_name(torch.empty(0, dtype=dtype))}" for device, dtype in PLACES]
    return pytest.mark.parametrize("place", PLACES, ids=names)(run)


def randn(*shape):
    return torch.randn(shape).to(Here.device, Here.dtype)


def rand(*shape):
    """float32: tables and scales."""
    return torch.rand(shape).to(Here.device)


def floats(*values):
    return torch.tensor(values, device=Here.device)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=Here.device)


def here(options):
    """With its tensors where the test is."""
    return {name: value.to(Here.device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def exact(value):
    """Tensors as numpy arrays of the same values; 16-bit and 8-bit floats as float32."""
    if isinstance(value, attune.KVCache):
        made = attune.KVCache(None)
        for name in made.__slots__:
            setattr(made, name, exact(getattr(value, name)))
        return made
    if not isinstance(value, torch.Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).detach().cpu().numpy()


def expect(q, k=None, v=None, **fields):
    return reference.attention(exact(q), exact(k), exact(v), **{name: exact(value) for name, value in fields.items()})


def check(out, expected, lse=None, lse_of=lambda lse: lse):
    """lse_of: the module's lse in the axes and convention of the reference."""
    dtype = dtype_name(torch.empty(0, dtype=Here.dtype))
    assert out.device.type == Here.device and (lse is None or lse.device == out.device and lse.dtype == torch.float32)
    assert_attention(exact(out), None, None, expected, dtype)
    if lse is not None:
        got = exact(lse_of(lse)).reshape(expected.lse.shape)
        infinite = np.isinf(expected.lse)
        assert (got[infinite] == np.inf).all()
        logit = 2**-8 * expected.products if dtype == "bfloat16" else 1e-5
        assert_close(np.where(infinite, 0, got), np.where(infinite, 0, expected.lse), logit + (2**-7 if dtype == "bfloat16" else 1e-5),
                     "lse")


def paged(pages, page_size, heads, d):
    return randn(pages, page_size, heads, d), randn(pages, page_size, heads, d)


TABLE = [[5, 1, 2], [0, 3, 2147480000]]
LENGTHS = [40, 17]

# ----------------------------------------------------------------------------------------------------------- flash_mla


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
    with pytest.raises(ValueError, match="seqused_kv"):
        call(q, kv, ints(0, 1).view(1, 2), None, 512, meta)
    call(q, kv, ints(0, 1).view(1, 2), ints(3), 512, meta)
    with pytest.raises(ValueError, match="num_heads_q is 2; the plan was made for 4"):
        call(q[:, :, :2], kv, ints(0, 1).view(1, 2), ints(3), 512, meta)
    with pytest.raises(NotImplementedError, match="flash_mla_sparse_fwd: indexer_topk is 512"):
        flash_mla.flash_mla_sparse_fwd(q[0], kv[0], ints(0).view(1, 1, 1), 1.0, indexer_topk=512)
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
        captured = run()
    graph.replay()
    before = [x.clone() for x in captured]
    change()
    graph.replay()
    got = [x.clone() for x in captured]
    want = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and not torch.equal(before[0], got[0])


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
                             ({"alibi_slopes": torch.ones(2)}, "flash_attn_func: alibi_slopes without causal")):
        with pytest.raises(NotImplementedError, match=message):
            flash_attn.flash_attn_func(x, x, x, **options)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: cache_leftpad is given"):
        flash_attn.flash_attn_with_kvcache(x, x, x, cache_leftpad=ints(1))
    with pytest.raises(ValueError, match="cache_seqlens is None; it must say where k and v go"):
        flash_attn.flash_attn_with_kvcache(x, x, x, x, x)
    with pytest.raises(ValueError, match="q requires grad"):
        flash_attn.flash_attn_func(x.requires_grad_(), x, x)


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
                             ({"kv_quant_mode": 4}, "kv_quant_mode is 4")):
        with pytest.raises(NotImplementedError, match="unified_attention: " + message):
            unified(q, k, k, q.clone(), ints(0, 1, 8), ints(40, 24), ints(*TABLE), **options)
    with pytest.raises(ValueError, match="kv_quant_mode is 3; it needs k_scale_cache"):
        unified(q, k, k, q.clone(), ints(0, 1, 8), ints(40, 24), ints(*TABLE), kv_quant_mode=3)


# -------------------------------------------------------------------------------------------------- names and positions


@pytest.mark.parametrize("function, names", [
    (flash_mla.flash_mla_with_kvcache,
     "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal is_fp8_kvcache indices "
     "attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length"),
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
     "sliding_window sm_scale skip_decode fp8_out_scale sinks is_block_table_ptr"),
    (unified_attention,
     "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap q_descale "
     "k_descale v_descale seq_threshold_3D num_par_softmax_segments softmax_segm_output softmax_segm_max softmax_segm_expsum "
     "alibi_slopes output_scale qq_bias sinks mm_prefix_range use_alibi_sqrt kv_quant_mode k_scale_cache v_scale_cache"),
])
def test_argument_order(function, names):
    assert list(inspect.signature(function).parameters) == names.split()


def test_alias_of_a_module():
    import subprocess
    import sys

    code = ("import sys, attune.compat.flash_attn as shim; sys.modules['flash_attn'] = shim\n"
            "import torch; from flash_attn import flash_attn_func; x = torch.ones(1, 2, 1, 8)\n"
            "assert torch.equal(flash_attn_func(x, x, x), x)")
    subprocess.run([sys.executable, "-c", code], check=True)
