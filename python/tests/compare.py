# SPDX-License-Identifier: Apache-2.0
"""Bounds: what the roundings of a format allow, element by element, from sum p |v|."""

import numpy as np

from reference import f64

# Relative error of the weights (inputs in 16 bits: the weights may be rounded to 16 bits too) and of one store.
COMPUTE = {"float32": 2e-5, "float16": 2**-10, "bfloat16": 2**-7}
STORE = {"float32": 2**-23, "float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}


def dtype_name(array):
    return str(array.dtype).rpartition(".")[2]


def assert_close(got, expected, bound, what):
    """!(error <= bound) fails, so that NaN does; NaN in expected: not written, not compared."""
    got, written = f64(got).reshape(expected.shape), ~np.isnan(expected)
    with np.errstate(invalid="ignore"):
        error = np.where(got == expected, 0.0, np.abs(got - expected))
    bad = ~(error <= bound) & written
    assert not bad.any(), (f"{what}: {bad.sum()} of {bad.size} differ; first at {np.argwhere(bad)[0]}: got {got[bad][0]}, "
                           f"expected {expected[bad][0]}, bound {np.broadcast_to(bound, bad.shape)[bad][0]}")


def assert_attention(out, lse, max_logits, expected, q_dtype, out_dtype=None):
    compute, store = COMPUTE[q_dtype], STORE[out_dtype or q_dtype]
    # Weights that are sums of 16-bit numbers are right to that much of the largest one, not of themselves.
    smallest = 2**-21 * expected.weight.max(axis=-1, keepdims=True)
    # 16-bit arithmetic may round prepared queries and dequantised keys; a logit then moves by that much of sum |q_i k_i|.
    logit = np.where(q_dtype == "float32", 2e-6, 2 * STORE[q_dtype]) * expected.products
    bound = (compute + 2 * logit[..., None]) * expected.weight + store * np.abs(expected.out) + smallest + 1e-7
    assert_close(out, expected.out, bound, "out")
    for got, name in ((lse, "lse"), (max_logits, "max_logits")):
        if got is not None:
            reference = getattr(expected, name)
            # The row sum adds the weights as they were rounded for the second product.
            bound = 2e-5 + logit + (compute / 2 if name == "lse" else 0)
            assert_close(got, reference, bound + 2e-6 * np.abs(np.where(np.isfinite(reference), reference, 0)), name)
