# SPDX-License-Identifier: Apache-2.0
"""Attune as torch's flash attention: what torch computes by it, against torch's plain mathematics in float64. On a GPU, too, where
there is one; the functions for CUDA's operators are called with tensors of the CPU everywhere."""

import contextlib
import inspect

import pytest

import attune
from compare import COMPUTE, dtype_name

torch = pytest.importorskip("torch", reason="torch is not installed: torch's attention is not tested")
import torch.nn.attention as torch_attention  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

from attune.integrations import torch_flash  # noqa: E402

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
on_devices = pytest.mark.parametrize("device", DEVICES)
has_list = pytest.mark.skipif(not hasattr(torch_attention, "register_flash_attention_impl"),
                              reason="this torch has no list of flash attentions")


@pytest.fixture(autouse=True)
def start():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch):
    """The calls of attention and of its backward, while Attune is torch's flash attention."""
    seen = []
    run, back = attune.attention, torch_flash.torch_backward.gradients
    monkeypatch.setattr(attune, "attention", lambda *args, **fields: seen.append("forward") or run(*args, **fields))
    monkeypatch.setattr(torch_flash.torch_backward, "gradients", lambda *args: seen.append("backward") or back(*args))
    torch_flash.register()
    assert "attune" in torch_attention.list_flash_attention_impls()
    torch_attention.activate_flash_attention_impl("attune")
    yield seen
    torch_attention.restore_flash_attention_impl()


def of_kind(device):
    """dtypes that torch's flash attention takes there."""
    return [torch.float32, torch.bfloat16] if device == "cpu" else [torch.bfloat16]


def of_flash(device):
    """On a GPU torch may take cuDNN's before flash attention."""
    return torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION) if device == "cuda" else contextlib.nullcontext()


def exact(function, *tensors):
    """What a function gives in float64 by torch's plain mathematics."""
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
        return function(*(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in tensors))


def with_gradients(attention):
    """(out, dq, dk, dv) of a function of q, k, v, and dout."""

    def run(q, k, v, dout):
        out = attention(q, k, v)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    return run


def assert_same(got, want, factor=4):
    bound = factor * COMPUTE[dtype_name(got)]
    torch.testing.assert_close(got.double(), want.detach(), rtol=bound, atol=bound)


OPTIONS = {"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.0}, "bool": {"attn_mask": "bool"}, "padded": {"attn_mask": "padded"},
           "float": {"attn_mask": "float"}, "float of each sequence": {"attn_mask": "each"}}


def mask_of(kind, rows, keys, device, dtype):
    mask = {"bool": lambda: torch.rand(2, 1, rows, keys) < 0.7, "padded": lambda: (torch.arange(keys) < torch.tensor([[3], [keys]]))[:, None, None],
            "float": lambda: torch.randn(rows, keys, dtype=dtype), "each": lambda: torch.randn(2, 1, rows, keys, dtype=dtype)}[kind]()
    return mask.to(device)


@has_list
@pytest.mark.parametrize("rows, keys", [(6, 6), (5, 9), (9, 5)])
@pytest.mark.parametrize("name", OPTIONS)
@on_devices
def test_scaled_dot_product_attention(name, rows, keys, device, calls):
    for dtype in of_kind(device):
        options = dict(OPTIONS[name])
        if "attn_mask" in options:
            options["attn_mask"] = mask_of(options["attn_mask"], rows, keys, device, dtype)
        if device == "cuda" and ("attn_mask" in options or (rows != keys and name == "causal")):
            pytest.skip("torch's flash attention on CUDA takes no mask")
        q, k, v = (torch.randn(2, n, 4, 16, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for n in (rows, keys, keys))
        dout = torch.randn_like(q)
        doubles = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
        want = exact(with_gradients(lambda q, k, v: sdpa(q, k, v, **doubles)), q, k, v, dout)
        before = len(calls)
        with of_flash(device):
            got = with_gradients(lambda q, k, v: sdpa(q, k, v, **options))(q, k, v, dout)
        assert {"forward", "backward"} == set(calls[before:])
        assert got[0].stride() == torch.empty_like(q).stride()  # as torch's compiler expects
        for a, b in zip(got, want):
            assert_same(a, b)


@has_list
@pytest.mark.parametrize("shape", [(5, 1), (1, 7), (1, 1), (2, 4, 5, 1), (2, 1, 1, 7), (1, 4, 1, 1)], ids=str)
def test_masks_broadcast(shape, calls):
    q, k, v = (torch.randn(2, 4, n, 16) for n in (5, 7, 7))
    for mask in (torch.rand(shape) < 0.6, torch.randn(shape)):
        want = exact(lambda q, k, v: sdpa(q, k, v, attn_mask=mask.double() if mask.is_floating_point() else mask), q, k, v)
        assert_same(sdpa(q, k, v, attn_mask=mask), want)
    assert calls


@has_list
def test_nothing(calls):
    q, k = (torch.randn(2, 4, n, 16) for n in (5, 7))
    for a, b in ((q, k[:, :, :0]), (q[:, :, :0], k), (q[:0], k[:0])):
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = sdpa(a, b, b, is_causal=True)
        assert out.shape == a.shape and not out.any()
        assert not any(x.any() for x in torch.autograd.grad(out.sum(), (a, b)))


@has_list
def test_other_layouts_and_what_torch_compiles(calls):
    def block(q, k, v):
        return sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    q, k, v = (torch.randn(2, heads, 6, 16).requires_grad_() for heads in (4, 4, 4))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for function in (block, compiled):
        out = function(q, k, v)
        assert_same(out, exact(block, q, k, v))
        for got, want in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(block(q, k, v).sum(), (q, k, v))):
            torch.testing.assert_close(got, want)
    assert calls.count("forward") == 4
    grouped = sdpa(q, k[:, :2], v[:, :2], enable_gqa=True)
    assert_same(grouped, exact(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), q, k[:, :2], v[:, :2]))
    fused = torch.randn(2, 4, 3, 9, 16)  # heads of q, k and v side by side: not one in the wrong order
    assert_same(sdpa(*fused.unbind(2)), exact(sdpa, *fused.unbind(2)))


@has_list
def test_torch_is_itself_again(calls):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="query.dtype is torch.float64; attune, .* takes float32, float16 and bfloat16"):
        sdpa(q.double(), q.double(), q.double())
    torch_attention.activate_flash_attention_impl("attune")
    sdpa(q, q, q)
    torch_attention.restore_flash_attention_impl()
    before = len(calls)
    sdpa(q.double(), q.double(), q.double())
    assert len(calls) == before > 0
    torch_attention.activate_flash_attention_impl("attune")  # for the fixture


def test_a_torch_without_the_list(monkeypatch):
    monkeypatch.delattr(torch_attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(NotImplementedError, match=rf"^torch {torch.__version__.partition('+')[0]}.* has no torch.nn.attention.register_flash"):
        torch_flash.register()


# ---------------------------------------------------------------------------------------------------------- varlen_attn


LENGTHS_Q, LENGTHS_K = [4, 1, 7], [4, 3, 9]


def offsets(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def each_sequence(window=(-1, -1)):
    """The same by torch's plain mathematics, sequence after sequence."""

    def attention(q, k, v):
        outs, begin_q, begin_k = [], 0, 0
        for n, s in zip(LENGTHS_Q, LENGTHS_K):
            place, key = torch.arange(s - n, s, device=q.device)[:, None], torch.arange(s, device=q.device)
            seen = torch.ones(n, s, dtype=torch.bool, device=q.device)
            if window[0] >= 0:
                seen &= key >= place - window[0]
            if window[1] >= 0:
                seen &= key <= place + window[1]
            parts = (x[begin : begin + m].transpose(0, 1) for x, begin, m in ((q, begin_q, n), (k, begin_k, s), (v, begin_k, s)))
            outs.append(sdpa(*parts, attn_mask=seen, enable_gqa=True).transpose(0, 1))
            begin_q, begin_k = begin_q + n, begin_k + s
        return torch.cat(outs)

    return attention


def torch_varlen():
    """torch's own module, if Attune is what it calls and it takes all that ours takes; torch 2.11 has no grouped heads or pages."""
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        return None
    module = pytest.importorskip("torch.nn.attention.varlen")
    theirs, ours = (inspect.signature(f).parameters.keys() for f in (module.varlen_attn, torch_flash.varlen_attn))
    return module if ours <= theirs else None


def varlen_functions():
    """attune's, and torch's own."""
    yield torch_flash.varlen_attn
    if module := torch_varlen():
        yield module.varlen_attn


class Aux:
    lse = True


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)])
@on_devices
def test_varlen_attn(window, device, calls):
    for dtype in of_kind(device):
        q, k, v = (torch.randn(sum(lengths), heads, 16, device=device, dtype=dtype).requires_grad_()
                   for lengths, heads in ((LENGTHS_Q, 4), (LENGTHS_K, 2), (LENGTHS_K, 2)))
        dout = torch.randn_like(q)
        want = exact(with_gradients(each_sequence(window)), q, k, v, dout)
        arguments = (offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device), max(LENGTHS_Q), max(LENGTHS_K))
        lses = []
        for function in varlen_functions():
            def attention(q, k, v):
                out, lse = function(q, k, v, *arguments, window_size=window, enable_gqa=True, return_aux=Aux())
                lses.append(lse.detach())
                return out

            got = with_gradients(attention)(q, k, v, dout)
            for a, b in zip(got, want):
                assert_same(a, b)
        assert lses[0].shape == (4, sum(LENGTHS_Q)) and all(torch.equal(lses[0], lse) for lse in lses)
        out = torch.empty_like(q)
        with torch.no_grad():
            torch_flash.varlen_attn_out(out, q, k, v, *arguments, window_size=window, enable_gqa=True)
        assert torch.equal(out, got[0])


@on_devices
def test_varlen_attn_over_pages(device, calls):
    q, pages = torch.randn(12, 4, 16, device=device), torch.randn(2, 6, 4, 2, 16, device=device)
    if device == "cuda":
        q, pages = q.bfloat16(), pages.bfloat16()
    table, used = torch.tensor([[4, 0, 0], [1, 0, 0], [5, 2, 3]], dtype=torch.int32, device=device), offsets(LENGTHS_K, device).diff()
    k, v = (torch.cat([x[table[b]].flatten(0, 1)[:n] for b, n in enumerate(LENGTHS_K)]) for x in pages)
    want = exact(each_sequence((-1, 0)), q, k, v)
    for function in varlen_functions():
        got = function(q, *pages, offsets(LENGTHS_Q, device), None, 7, 12, window_size=(-1, 0), enable_gqa=True, block_table=table,
                       seqused_k=used, num_splits=1)
        assert_same(got, want)
    if module := torch_varlen():
        out = torch.empty_like(q)
        module.varlen_attn_out(out, q, *pages, offsets(LENGTHS_Q, device), None, 7, 12, window_size=(-1, 0),
                               enable_gqa=True, block_table=table, seqused_k=used)
        assert_same(out, want)


def test_varlen_attn_refuses_by_name():
    q, cu = torch.randn(5, 4, 16), torch.tensor([0, 5], dtype=torch.int32)
    for message, arguments, options in [
        ("scale is 0; it must be above 0", (q, q, q, cu, cu, 5, 5), {"scale": 0}),
        (r"query has shape \[1, 5, 4, 16\]", (q[None], q, q, cu, cu, 5, 5), {}),
        ("query has 4 heads and key 2; enable_gqa is False", (q, q[:, :2], q[:, :2], cu, cu, 5, 5), {}),
        ("cu_seq_k is None; keys without block_table need it", (q, q, q, cu, None, 5, 5), {}),
        ("seqused_k is None; with block_table", (q, q[None], q[None], cu, None, 5, 5), {"block_table": cu[None]}),
    ]:
        with pytest.raises(ValueError, match=message):
            torch_flash.varlen_attn(*arguments, **options)


# -------------------------------------------------------------------------------------------------- CUDA's operators


@pytest.mark.parametrize("rows, causal, scale", [(6, False, None), (6, True, 0.0), (4, True, None)])
def test_functions_of_cuda_operators(rows, causal, scale):
    """Causality is aligned to the last key there. Outputs are laid out as torch says its kernels do."""
    seen = torch.ones(rows, 6, dtype=torch.bool).tril(6 - rows) if causal else None
    for turned in (False, True):
        sizes = ((rows, 16), (6, 16), (6, 24))
        q, k, v = (torch.randn(2, n, 4, d).transpose(1, 2) if turned else torch.randn(2, 4, n, d) for n, d in sizes)
        dout = torch.randn(2, 4, rows, 24)
        want = exact(with_gradients(lambda q, k, v: sdpa(q, k, v, attn_mask=seen, scale=scale)), q, k, v, dout)
        out, lse, *_, unused = torch_flash._sdpa(q, k, v, is_causal=causal, scale=scale)
        # Older torches' results have q's channels, whatever v's are.
        results = torch_flash._sdpa(q, k, v[..., :16], is_causal=causal)
        fake = torch.ops.aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v[..., :16])), is_causal=causal)
        assert len(results) == len(fake) and results[4:6] == (rows, 6)
        for a, b in zip(results, fake):
            if isinstance(a, torch.Tensor) and b is not None:
                assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        made = torch_flash._sdpa_backward(dout, q, k, v, out, lse, None, None, rows, 6, 0.0, causal, unused, unused, scale=scale)
        for a, b in zip((out, *made), want):
            assert_same(a, b)
