# SPDX-License-Identifier: Apache-2.0
"""Tests with torch that run on the CPU, and on the first GPU where there is one, in float32 and in bfloat16. Without torch the
modules that import this are skipped."""

import functools
import inspect

import numpy as np
import pytest

import attune
import reference
from compare import assert_attention, assert_close, dtype_name

torch = pytest.importorskip("torch", reason="torch is not installed: attune.compat is not tested")


class Here:
    """Where the tensors of a test are, and the dtype of those that are neither tables nor parameters."""

    device, dtype = "cpu", torch.float32


DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
PLACES = [(device, dtype) for device in DEVICES for dtype in (torch.float32, torch.bfloat16)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def start():
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
