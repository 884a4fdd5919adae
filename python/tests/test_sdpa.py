# SPDX-License-Identifier: Apache-2.0
"""attune.sdpa against torch.nn.functional.scaled_dot_product_attention in float64: every mask, broadcast, rank and layout."""

import subprocess
import sys

import numpy as np
import pytest

import attune
from compare import COMPUTE, dtype_name

torch = pytest.importorskip("torch", reason="torch is not installed: sdpa is not tested")
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # noqa: E402

on_devices = pytest.mark.parametrize("device", ["cpu"] + ["cuda"] * torch.cuda.is_available())
in_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def start():
    torch.manual_seed(0)


def exact(x):
    return x.double() if type(x) is torch.Tensor and x.is_floating_point() else x


def check(q, k, v, *arguments, **options):
    """Both calls with the same arguments; numbers are of about 1."""
    try:
        got = attune.sdpa(q, k, v, *arguments, **options)
    except attune.Unsupported as reason:
        if not q.is_cuda:
            raise
        pytest.skip(str(reason))
    want = torch_sdpa(*map(exact, (q, k, v, *arguments)), **{name: exact(value) for name, value in options.items()})
    assert got.dtype == q.dtype
    bound = 2 * COMPUTE[dtype_name(got)]
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)
    return got


def qkv(q, k, v=None, device="cpu", dtype=torch.float32):
    return tuple(torch.randn(shape).to(device, dtype) for shape in (q, k, v or k))


@pytest.mark.parametrize("rows, keys", [(5, 5), (5, 7), (7, 5), (1, 9), (9, 1), (3, 70)])
@in_dtypes
@on_devices
def test_causality_is_aligned_to_the_first_key(rows, keys, dtype, device):
    q, k, v = qkv((2, 4, rows, 16), (2, 4, keys, 16), device=device, dtype=dtype)
    check(q, k, v, is_causal=True)
    check(q, k, v, None, 0.0, True, scale=0.3)
    check(q, k, v)
    check(q, k, v, attn_mask=causal_upper_left(rows, keys))
    if rows <= keys:
        check(q, k, v, attn_mask=causal_lower_right(rows, keys))


SHAPES = ["LS", "B1LS", "1HLS", "BHLS", "HLS", "B11S", "L1", "1S", "BH11", "BHL1"]


@pytest.mark.parametrize("rows, keys", [(5, 7), (7, 5), (5, 5), (1, 7)])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("axes", SHAPES)
@in_dtypes
@on_devices
def test_masks(axes, kind, rows, keys, dtype, device):
    shape = [{"B": 2, "H": 4, "L": rows, "S": keys, "1": 1}[axis] for axis in axes]
    q, k, v = qkv((2, 4, rows, 16), (2, 4, keys, 16), device=device, dtype=dtype)
    mask = torch.rand(shape) < 0.6
    if kind == "float":
        mask = torch.randn(shape).masked_fill(mask.logical_not(), float("-inf")).to(dtype)
    check(q, k, v, attn_mask=mask.to(device))
    if dtype == torch.bfloat16 and kind == "float":
        check(q, k, v, attn_mask=mask.to(device).float())


@pytest.mark.parametrize("used", [(7, 7), (3, 7), (0, 5), (0, 0)])
@pytest.mark.parametrize("expanded", [False, True])
@on_devices
def test_right_padding(used, expanded, device):
    q, k, v = qkv((2, 4, 6, 16), (2, 2, 7, 16), device=device, dtype=torch.bfloat16)
    mask = (torch.arange(7) < torch.tensor(used)[:, None])[:, None, None].to(device)
    check(q, k, v, attn_mask=mask.expand(2, 4, 6, 7) if expanded else mask, enable_gqa=True)
    check(q, k, v, attn_mask=mask[1:], enable_gqa=True)  # one for all


def test_right_padding_is_lengths_and_hides_values_that_are_not_finite():
    q, k, v = qkv((2, 4, 6, 16), (2, 4, 7, 16))
    mask = (torch.arange(7) < torch.tensor([[3], [5]]))[:, None, None]
    want = attune.sdpa(q, k, v, mask)
    v[0, :, 3:], k[1, :, 5:] = float("nan"), float("inf")
    assert torch.equal(attune.sdpa(q, k, v, mask), want)
    mask[0, ..., 3:] = True  # a mask that changes is looked at again
    assert attune.sdpa(q, k, v, mask)[0].isnan().all()
    mask[0, ..., 1:] = False
    torch.testing.assert_close(attune.sdpa(q, k, v, mask)[0], v[0, :, :1].expand(4, 6, 16))


@pytest.mark.parametrize("q, k, v, gqa", [
    ("4HLE", "1HSE", "1HSE", False), ("1HLE", "4HSE", "4HSE", False), ("2HLE", "21SE", "21SE", False), ("2HLE", "21SE", "2HSE", False),
    ("21LE", "2HSE", "2HSE", False), ("2HLE", "2HSE", "21SE", False), ("2HLE", "22SE", "22SE", True), ("2HLE", "21SE", "21SE", True),
    ("2HLE", "22SE", "24SE", True), ("2HLE", "12SE", "12SE", True), ("HLE", "HSE", "HSE", False), ("HLE", "2SE", "2SE", True),
    ("LE", "SE", "SE", False), ("HLE", "2HSE", "2HSE", False), ("LE", "2HSE", "HSE", False), ("32HLE", "32HSE", "32HSE", False),
    ("32HLE", "122SE", "22SE", True), ("2HLE", "32HSE", "HSE", False), ("23HLE", "3HSE", "HSE", False)])
@pytest.mark.parametrize("mask", [None, "LS", "HLS", "float"])
@on_devices
def test_broadcasts_and_ranks(q, k, v, gqa, mask, device):
    def shape(axes):
        return tuple({"H": 8, "L": 5, "S": 7, "E": 16}.get(axis) or int(axis) for axis in axes)

    q, k, v = qkv(shape(q), shape(k), shape(v), device=device)
    if mask == "HLS" and max(q.dim(), k.dim()) < 3:
        mask = None
    if mask is not None:
        mask = torch.randn(5, 7) if mask == "float" else torch.rand(shape(mask)) < 0.7
        mask = mask.to(device)
    check(q, k, v, attn_mask=mask, enable_gqa=gqa)


def test_masks_of_more_axes():
    q, k, v = qkv((3, 2, 4, 5, 16), (3, 2, 4, 7, 16))
    for shape in ((3, 2, 4, 5, 7), (3, 1, 1, 5, 7), (1, 2, 4, 1, 7), (1, 1, 1, 5, 7)):
        check(q, k, v, attn_mask=torch.rand(shape) < 0.6)
        check(q, k, v, attn_mask=torch.randn(shape))


LAYOUTS = {
    "[batch, seqlen, 3, heads, d]": lambda: torch.randn(2, 9, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(),
    "[batch, heads, 3, seqlen, d]": lambda: torch.randn(2, 4, 3, 9, 16).permute(2, 0, 1, 3, 4).unbind(),
    "[batch, heads, 3, d, seqlen]": lambda: torch.randn(2, 4, 3, 16, 9).permute(2, 0, 1, 4, 3).unbind(),
    "[seqlen, batch, heads, 3, d]": lambda: torch.randn(9, 2, 4, 3, 16).permute(3, 1, 2, 0, 4).unbind(),
    "300 heads": lambda: torch.randn(3, 2, 300, 9, 16).unbind(),
    "300 heads of one sequence": lambda: torch.randn(3, 1, 300, 9, 16).unbind(),
    "every second head": lambda: torch.randn(3, 2, 8, 9, 16)[:, :, ::2].unbind(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    q, k, v = LAYOUTS[name]()
    mask = torch.rand(q.shape[0], 1, 9, 9) < 0.6
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": torch.randn(9, 9)}, {"attn_mask": mask[:, :, :1]}):
        check(q, k, v, **options)
    assert attune.sdpa(q, k, v).transpose(1, 2).is_contiguous()


def test_nothing():
    q, k, v = qkv((2, 4, 5, 16), (2, 4, 7, 16))
    for a, b, c in ((q, k[:, :, :0], v[:, :, :0]), (q[:, :, :0], k, v), (q[:0], k[:0], v[:0])):
        check(a, b, c)
        check(a, b, c, attn_mask=torch.ones(a.shape[2], b.shape[2], dtype=torch.bool))
        check(a, b, c, attn_mask=torch.ones(a.shape[0], 1, a.shape[2], b.shape[2]))
    check(q, k, v, scale=0.0)
    check(q, k, v, scale=-0.5)


OPTIONS = {
    "plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.0}, "bool": {"attn_mask": torch.rand(6, 8, generator=torch.manual_seed(1)) < 0.7},
    "lengths": {"attn_mask": (torch.arange(8) < torch.tensor([[3], [8]]))[:, None, None]},
}


@pytest.mark.parametrize("name", [*OPTIONS, "float", "float of each sequence"])
@pytest.mark.parametrize("rows", [6, 8, 11])
def test_gradients_are_those_of_torch(name, rows):
    """Of the mask, too."""
    options = dict(OPTIONS.get(name, {}))
    if name.startswith("float"):
        options["attn_mask"] = torch.randn((2, 1, rows, 8) if "each" in name else (rows, 8)).requires_grad_()
    if name == "bool":
        options["attn_mask"] = torch.rand(rows, 8) < 0.7
    inputs = [x.requires_grad_() for x in qkv((2, 4, rows, 16), (2, 2, 8, 16))]
    if "attn_mask" in options and options["attn_mask"].requires_grad:
        inputs.append(options["attn_mask"])
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out = attune.sdpa(*inputs[:3], enable_gqa=True, **options)
    dout = torch.randn_like(out)
    if len(inputs) == 4:
        options["attn_mask"] = doubles[3]
    want = torch.autograd.grad(torch_sdpa(*doubles[:3], enable_gqa=True, **options), doubles, dout.double())
    for got, gradient in zip(torch.autograd.grad(out, inputs, dout), want):
        torch.testing.assert_close(got.double(), gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*OPTIONS, "float", "float of each sequence"])
def test_compiles_into_one_graph(name):
    options = dict(OPTIONS.get(name, {}))
    mask = options.pop("attn_mask", None)
    if name.startswith("float"):
        mask = torch.randn((2, 1, 6, 8) if "each" in name else (6, 8))
    q, k, v = qkv((2, 4, 6, 16), (2, 2, 8, 16))

    def call(q, k, v, mask):
        return attune.sdpa(q * 2, k, v, attn_mask=mask, enable_gqa=True, **options) + 1

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(q, k, v, mask), call(q, k, v, mask))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want, got = (torch.autograd.grad(f(*leaves, mask).square().sum(), leaves) for f in (call, compiled))
    for a, b in zip(want, got):
        torch.testing.assert_close(a, b)


def test_the_first_call_may_be_compiled():
    code = ("import torch, attune; q = torch.randn(2, 4, 5, 16, requires_grad=True); mask = torch.rand(5, 5) < 0.8\n"
            "f = torch.compile(lambda q, mask: attune.sdpa(q, q, q, mask), backend='aot_eager', fullgraph=True)\n"
            "f(q.detach(), mask); f(q, mask).sum().backward(); assert q.grad.any()")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numpy_before_torch():
    code = ("import attune, numpy\n"
            "try: attune.sdpa(*[numpy.ones((1, 2, 3, 8))] * 3)\n"
            "except attune.WrongType as error: assert 'sdpa takes tensors of torch, attune.attention other' in str(error)\n"
            "else: raise AssertionError")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_autocast():
    q, k, v = qkv((2, 4, 6, 16), (2, 4, 8, 16))
    mask = torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (function(q, k.bfloat16(), v, mask) for function in (attune.sdpa, torch_sdpa))
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


def test_other_things_are_refused_by_name():
    q, k, v = qkv((2, 4, 5, 16), (2, 4, 7, 16))
    for kind, message, arguments, options in [
        (NotImplementedError, "dropout_p is 0.1; 0 is supported", (q, k, v), {"dropout_p": 0.1}),
        *((TypeError, "^scale is 'x'; a float is expected", (q.clone().requires_grad_(grad), k, v), {"scale": "x"}) for grad in (False, True)),
        (TypeError, "^is_causal is 'no'; a bool is expected", (q, k, v), {"is_causal": "no"}),
        (TypeError, "^enable_gqa is 2; a bool is expected", (q, k, v), {"enable_gqa": 2}),
        (ValueError, "attn_mask is given, and is_causal is True", (q, k, v, torch.zeros(5, 7)), {"is_causal": True}),
        (ValueError, r"attn_mask has dtype torch.float64; torch.bool, torch.float32", (q, k, v, torch.zeros(5, 7).double()), {}),
        (ValueError, r"attn_mask has shape \[1, 1, 5, 6\], which does not broadcast to \[2, 4, 5, 7\]", (q, k, v, torch.zeros(5, 6)), {}),
        (ValueError, r"attn_mask has shape \[3, 2, 4, 5, 7\], which", (q, k, v, torch.zeros(3, 2, 4, 5, 7)), {}),
        (ValueError, r"heads of q, k and v \(enable_gqa is False\) do not broadcast: \[4\], \[2\], \[2\]", (q, k[:, :2], v[:, :2]), {}),
        (ValueError, "q has 4 heads, which is no multiple of k's 3 and v's 3", (q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
        (ValueError, r"leading axes of q, k and v do not broadcast: \[2\], \[3\], \[2\]", (q, k[:1].repeat(3, 1, 1, 1), v), {}),
        (ValueError, "k has head_dim 15, but q 16", (q, k[..., :15], v), {}),
        (ValueError, "v has 6 tokens, but k 7", (q, k, v[:, :, :6]), {}),
        (ValueError, r"q has shape \[16\]", (q[0, 0, 0], k, v), {}),
        (ValueError, "k has dtype torch.bfloat16, but q torch.float32", (q, k.bfloat16(), v), {}),
        (TypeError, "q has dtype torch.float64", (q.double(), k.double(), v.double()), {}),
        (TypeError, "q is <class 'numpy.ndarray'>; sdpa takes tensors of torch, attune.attention other", (np.ones((2, 4, 5, 16)), k, v), {}),
        (TypeError, "v is <class 'numpy.ndarray'>; sdpa takes tensors", (q, k, v.numpy()), {}),
        (TypeError, "^k is <class 'NoneType'>; sdpa takes tensors", (q, None, v), {}),
        (TypeError, "^v is <class 'NoneType'>; sdpa takes tensors", (q, k, None), {}),
        (NotImplementedError, "^q is on meta; tensors on cpu and cuda are", (q.to("meta"), k.to("meta"), v.to("meta")), {}),
        (ValueError, "^k is on meta, but q on cpu", (q, k.to("meta"), v), {}),
        (ValueError, "^attn_mask is on meta, but q on cpu", (q, k, v, torch.zeros(5, 7, device="meta")), {}),
        (NotImplementedError, "k is a nested tensor", (q, torch.nested.nested_tensor([torch.randn(4, 7, 16)]), v), {}),
    ]:
        with pytest.raises(kind, match=message):
            attune.sdpa(*arguments, **options)
