# SPDX-License-Identifier: Apache-2.0
"""Gradients of attune.attention in torch: against torch's own, for every argument that has one."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attune  # noqa: E402
from attune import Unsupported  # noqa: E402
from attune.integrations import torch_backward  # noqa: E402
from reference import t5_bucket  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def arrays(dtype, device, lengths_q, lengths_kv, heads=(4, 2), dims=(64, 32)):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    offsets = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_kv)]
    q = normal(sum(lengths_q), heads[0], dims[0])
    k, v = (normal(sum(lengths_kv), heads[1], dim) for dim in dims)
    return q, k, v, {"cu_seqlens_q": offsets[0], "cu_seqlens_kv": offsets[1]}


def reference(q, k, v, offsets, causal=True, window_left=None, softcap=None, sinks=None, bias=None, t5_bias=None, t5_max_distance=None):
    """(out, lse) by torch's own operators, in float64."""
    outs, lses = [], []
    begins_q, begins_kv = offsets["cu_seqlens_q"].tolist(), offsets["cu_seqlens_kv"].tolist()
    for b in range(len(begins_q) - 1):
        rows, keys = slice(*begins_q[b:b + 2]), slice(*begins_kv[b:b + 2])
        group = q.shape[1] // k.shape[1]
        x, y, z = (t.double().transpose(0, 1) for t in (q[rows], k[keys].repeat_interleave(group, 1), v[keys].repeat_interleave(group, 1)))
        s = x @ y.transpose(1, 2) / q.shape[-1] ** 0.5
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        n, m = s.shape[1:]
        place, key = torch.arange(m - n, m, device=q.device)[:, None], torch.arange(m, device=q.device)[None]
        if bias is not None:
            s = s + bias[:, m - n:m, :m].double()
        if t5_bias is not None:
            of_distance = torch.tensor([t5_bucket(x, t5_bias.shape[1], t5_max_distance, False) for x in range(-m, m + 1)], device=q.device)
            s = s + t5_bias.double()[:, of_distance[key - place + m]]
        hidden = torch.zeros(n, m, dtype=torch.bool, device=q.device)
        if causal:
            hidden |= key > place
        if window_left is not None:
            hidden |= key < place - window_left
        s = s.masked_fill(hidden, -torch.inf)
        lse = s.logsumexp(-1)
        all_of_it = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
        outs.append(((s - all_of_it[..., None]).exp() @ z).transpose(0, 1))
        lses.append(lse.transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


CASES = {
    "causal": {}, "full": {"causal": False}, "window": {"window_left": 9}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": True},
    "bias": {"bias": 4}, "shared_bias": {"bias": 1, "causal": False}, "capped_bias": {"bias": 4, "softcap": 3.0},
    "t5": {"t5_bias": True, "t5_max_distance": 40},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name, dtype, device):
    fields = dict(CASES[name])
    q, k, v, offsets = arrays(dtype, device, [20, 1, 33], [20, 15, 70])
    tables = []
    if fields.pop("sinks", False):
        fields["sinks"] = torch.linspace(-1, 2, 4, device=device).requires_grad_()
        tables.append(fields["sinks"])
    for table, shape in (("bias", (fields.get("bias"), 70, 70)), ("t5_bias", (4, 16))):
        if table in fields:
            fields[table] = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
            tables.append(fields[table])
    fields.setdefault("causal", True)
    out, lse = attune.attention(q, k, v, return_lse=True, **offsets, **fields)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    inputs = (q, k, v, *tables)
    got, again = (torch.autograd.grad((out, lse), inputs, (dout, dlse), retain_graph=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(got, again)), "two runs differ"
    want = torch.autograd.grad(reference(q, k, v, offsets, **fields), inputs, (dout.double(), dlse.double()))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for x, y, of in zip(got, want, inputs):
        assert x.dtype == of.dtype and x.shape == of.shape
        assert (x.double() - y).norm() <= tolerance * y.norm(), name


def test_only_what_is_wanted_is_computed():
    q, k, v, offsets = arrays(torch.float32, "cpu", [7, 3], [7, 9])
    k.requires_grad_(False)
    out = attune.attention(q, k, v, causal=True, **offsets)
    out.sum().backward()  # whose gradient is expanded
    assert k.grad is None and q.grad.isfinite().all() and v.grad.isfinite().all()
    want = torch.autograd.grad(reference(q, k, v, offsets)[0].sum(), (q, v))
    torch.testing.assert_close((q.grad, v.grad), tuple(x.float() for x in want), rtol=1e-4, atol=1e-5)


def test_rows_without_a_sequence_have_no_gradient():
    q, k, v, offsets = arrays(torch.float32, "cpu", [5, 3], [5, 9])
    offsets = {"cu_seqlens_q": offsets["cu_seqlens_q"][:2], "cu_seqlens_kv": offsets["cu_seqlens_kv"][:2]}
    attune.attention(q, k, v, causal=True, **offsets)[:5].sum().backward()
    assert not q.grad[5:].any() and not k.grad[5:].any() and not v.grad[5:].any() and q.grad[:5].any()


def test_what_has_no_backward_is_refused_by_name():
    q, k, v, offsets = arrays(torch.float32, "cpu", [5], [5])
    with pytest.raises(ValueError, match="prologue is given, and q requires grad: attention over dense keys alone has a backward"):
        attune.attention(q, k, v, prologue=attune.Prologue(logn=torch.ones(1)), **offsets)
    with pytest.raises(ValueError, match="out is given, and q requires grad"):
        attune.attention(q, k, v, out=torch.empty(5, 4, 32), **offsets)
    with pytest.raises(ValueError, match="return_max_logits is true, and q requires grad"):
        attune.attention(q, k, v, return_max_logits=True, **offsets)
    with pytest.raises(ValueError, match="v is None, and q requires grad"):
        attune.attention(q, k, **offsets)
    for name, given in (("k", (q, k.detach().numpy(), v)), ("v", (q, k, v.detach().numpy()))):
        with pytest.raises(TypeError, match=f"^{name} is <class 'numpy.ndarray'>, and . requires grad: gradients need tensors of torch$"):
            attune.attention(*given, **offsets)
    with pytest.raises(TypeError, match="^sinks is <class 'numpy.ndarray'>, and q requires grad"):
        attune.attention(q, k, v, sinks=torch.zeros(4).numpy(), **offsets)
    for name, value in (("alibi_slopes", torch.ones(4)), ("softmax_scale", torch.tensor(0.3))):
        with pytest.raises(ValueError, match=f"{name} requires grad, and has no gradient"):
            attune.attention(q, k, v, **{name: value.requires_grad_()}, **offsets)
    with pytest.raises(ValueError, match="workspace is given, and gradients are wanted"):
        attune.attention(q, k, v, workspace=torch.empty(1 << 20, dtype=torch.uint8), **offsets)
    attune.attention(q, k, v, skip_decode=False, head_dim_v=32, **offsets)  # which ask for nothing


def test_a_second_derivative_is_refused():
    q, k, v, offsets = arrays(torch.float32, "cpu", [5], [5])
    (first,) = torch.autograd.grad(attune.attention(q, k, v, **offsets).square().sum(), q, create_graph=True)
    with pytest.raises(Exception, match="attention has no second derivative"):
        first.square().sum().backward()


def test_what_the_backward_lacks_is_said_by_the_forward():
    q, k, v, offsets = arrays(torch.float32, "cpu", [5], [5], dims=(288, 288))
    with pytest.raises(Unsupported, match="head_dim_qk: 288.*; under torch.no_grad\\(\\) the forward alone"):
        attune.attention(q, k, v, **offsets)
    with torch.no_grad():
        attune.attention(q, k, v, **offsets)


def test_the_forward_asks_for_the_gradients_that_will_be_wanted(monkeypatch):
    asked = []
    whole = torch_backward._core.attention_backward_supported
    monkeypatch.setattr(torch_backward._core, "attention_backward_supported", lambda *x: (asked.append(sorted(x[1])), whole(*x))[1])
    q, k, v, offsets = arrays(torch.float32, "cpu", [5], [5])
    bias = torch.zeros(1, 5, 5)
    attune.attention(q, k, v, bias=bias, **offsets)
    attune.attention(q, k, v, bias=bias.requires_grad_(), **offsets)
    assert asked == [["dk", "dout", "dq", "dv"], ["dbias", "dk", "dout", "dq", "dv"]]


def test_views_that_no_kernel_takes_are_copied():
    q, k, v, offsets = arrays(torch.float32, "cpu", [5, 3], [5, 9])
    out = attune.attention(q, k, v, causal=True, **offsets)
    # What the backward is given there; on the CPU any row would do.
    for x in (torch.zeros(99)[3:].view(4, 24), torch.zeros(1).expand(4, 24), torch.zeros(24, 4).t(), torch.zeros(4, 27)[:, :24]):
        copy = torch_backward._aligned(x)
        assert copy is not x and copy.data_ptr() % 16 == 0 and copy.is_contiguous() and torch.equal(copy, x)
    kept = torch.zeros(4, 2, 24)[:, 1]  # a packed view whose rows lie well
    assert torch_backward._aligned(kept) is kept
    joined = torch.cat([torch.zeros(3), out.flatten()])  # whose gradient begins 12 bytes behind a multiple of 16
    weights = torch.randn_like(joined)
    got = torch.autograd.grad((joined * weights).sum(), (q, k, v))
    want = torch.autograd.grad((reference(q, k, v, offsets)[0].flatten() * weights[3:]).sum(), (q, k, v))
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)


def test_the_first_call_may_be_compiled():
    code = ("import torch, attune; q = torch.randn(2, 5, 4, 16, requires_grad=True); k = torch.randn(2, 5, 4, 16)\n"
            "f = torch.compile(lambda q, k: attune.attention(q, k, k, causal=True), backend='aot_eager')\n"
            "f(q.detach(), k); f(q, k).sum().backward(); assert q.grad.any()")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shims_are_differentiable():
    from attune.compat import flash_attn, flash_mla

    q, k, v, offsets = arrays(torch.float32, "cpu", [7, 3], [7, 9])
    starts = tuple(offsets.values())
    want = reference(q, k, v, offsets)
    dout, dlse = torch.randn_like(want[0]), torch.randn_like(want[1])
    want = torch.autograd.grad(want, (q, k, v), (dout, dlse))
    theirs = flash_attn.flash_attn_varlen_func(q, k, v, *starts, 7, 9, causal=True, deterministic=True, return_attn_probs=True)
    kv = torch.cat([k, v], dim=-1)
    packed = flash_mla.flash_attn_varlen_kvpacked_func(q, kv, *starts, 7, 9, 64, causal=True, deterministic=True)
    for (out, lse), weights in ((theirs[:2], (dout, dlse.T)), (packed, (dout, dlse))):
        got = torch.autograd.grad((out, lse), (q, k, v), tuple(x.to(y.dtype) for x, y in zip(weights, (out, lse))), retain_graph=True)
        for x, y in zip(got, want):
            torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)


def test_under_the_compiler_there_is_no_break():
    q, k, v, offsets = arrays(torch.float32, "cpu", [7, 3], [7, 9])
    step = torch.compile(lambda q, k, v: attune.attention(q, k, v, causal=True, **offsets).square().sum(), backend="aot_eager",
                         fullgraph=True, dynamic=False)
    want = torch.autograd.grad(attune.attention(q, k, v, causal=True, **offsets).square().sum(), (q, k, v))
    got = torch.autograd.grad(step(q, k, v), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(want, got))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    q, k, v, offsets = arrays(torch.float32, device, [7, 3], [7, 9])
    attune.attention(q.detach(), k.detach(), v.detach(), **offsets)
    sinks, bias = (torch.zeros(shape, device=device, requires_grad=True) for shape in ((4, ), (1, 9, 9)))
    arrays_given = (*offsets.values(), None, None, None, None, None, None)
    for fields in ({"causal": True}, {"softcap": 2.0, "window_left": 3}):
        results = torch.library.opcheck(torch.ops.attune.attention_with_backward.default, (q, k, v, sinks, bias, None, *arrays_given),
                                        fields)
        assert set(results.values()) == {"SUCCESS"}, results


def test_a_name_that_is_no_argument():
    q = torch.randn(5, 2, 16, requires_grad=True)
    with pytest.raises(TypeError, match="'is_causal' is not an argument of this operation; did you mean causal"):
        attune.attention(q, q, q, is_causal=True)


def test_transforms_of_torch_func_are_refused_by_name():
    q, k = torch.randn(2, 5, 2, 16), torch.randn(5, 2, 16)
    for transform, given in ((torch.func.grad, q[0]), (torch.func.jacrev, q[0]), (lambda f: torch.func.vmap(torch.func.grad(f)), q)):
        with pytest.raises(ValueError, match="q is under a transform of torch.func .* torch.autograd.grad does"):
            transform(lambda x: attune.attention(x, k, k, causal=True).sum())(given)


def test_transforms_without_gradients_are_refused_by_name():
    q, k, parts, lse = torch.randn(2, 5, 2, 16), torch.randn(5, 2, 16), torch.randn(3, 2, 5, 2, 16), torch.randn(3, 2, 5, 2)
    message = "is under a transform of torch.func .*: call it outside, once for the whole batch"
    for transform in (torch.func.vmap, torch.func.functionalize, lambda f: torch.func.vmap(torch.no_grad()(f))):
        with pytest.raises(ValueError, match=f"^q {message}"):
            transform(lambda x: attune.attention(x, x, x))(q)
    with pytest.raises(ValueError, match=f"^k {message}"):
        torch.func.vmap(lambda x: attune.attention(k, x, k))(q)
    with pytest.raises(ValueError, match=f"^partial_out {message}"):
        torch.func.vmap(attune.merge)(parts, lse)


def test_a_tangent_is_not_lost():
    q, k, tangent = (torch.randn(5, 2, 16) for _ in range(3))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        with pytest.raises(ValueError, match="q has a tangent of forward-mode differentiation"):
            attune.attention(dual, k, k)
        with torch.no_grad(), pytest.raises(ValueError, match="k has a tangent"):
            attune.attention(q, dual, k)
        assert torch.equal(attune.attention(torch.autograd.forward_ad.unpack_dual(dual).primal, k, k), attune.attention(q, k, k))
        with pytest.raises(NotImplementedError, match="jvp"):
            attune.attention(dual.requires_grad_(), k, k)


def test_what_is_stored_negated_is_refused_or_resolved():
    stored = torch.randn(5, 2, 16, dtype=torch.complex64)
    q, k = torch.imag(stored.conj()), torch.randn(5, 2, 16)
    assert q.is_neg()
    with pytest.raises(ValueError, match="q has the negative bit.*: pass q.resolve_neg()"):
        attune.attention(q, k, k)
    with pytest.raises(ValueError, match="k has the negative bit"):
        attune.attention(k.half(), torch.imag(stored.to(torch.complex32).conj()), k.half())
    with pytest.raises(ValueError, match="out has the negative bit"):
        attune.attention(k, k, k, out=torch.imag(torch.zeros_like(stored).conj()))
    want = attune.attention(q.resolve_neg(), k, k)
    assert torch.equal(attune.attention(q, k.requires_grad_(), k), want)  # torch's dispatcher resolves it


WRONG_VALUES = [{"softcap": "x"}, {"causal": "yes"}, {"causal": 2}, {"window_left": 1.5}, {"window_left": 2**70}, {"max_seqlen_kv": 2**70},
                {"softmax_scale": 1e40}, {"head_dim_v": 7}, {"head_dim_v": -1}, {"head_dim_v": 2**40}, {"head_dim_v": "x"},
                {"return_lse": "no"}]


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=repr)
def test_wrong_values_are_refused_as_without_gradients(wrong):
    x = torch.randn(5, 4, 16)
    said = []
    for q in (x, x.clone().requires_grad_()):
        with pytest.raises(attune.Error) as raised:
            attune.attention(q, x, x, **wrong)
        said.append((type(raised.value), str(raised.value)))
    assert "head_dim_v" in wrong or said[0] == said[1]
    assert said[0][0] is said[1][0] and next(iter(wrong)) in said[1][1]


def test_numbers_of_numpy_beside_gradients():
    x = torch.randn(5, 4, 16, requires_grad=True)
    values = {"causal": np.bool_(True), "window_left": np.int64(3), "softmax_scale": np.float32(0.25), "head_dim_v": 16}
    assert torch.equal(attune.attention(x, x, x, **values), attune.attention(x, x, x, causal=True, window_left=3, softmax_scale=0.25))
