# SPDX-License-Identifier: Apache-2.0
"""attune.integrations.jax: values and gradients against JAX's own, in float64 where it counts, and under its transformations."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: attention in its programs is not tested")

import jax.numpy as jnp  # noqa: E402

import attune  # noqa: E402
from attune.integrations.jax import attention  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def inputs(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def qkv(seqlens=(9, 14), dtype=jnp.float32, batch=2):
    return inputs((batch, seqlens[0], 4, 16), (batch, seqlens[1], 2, 16), (batch, seqlens[1], 2, 24), dtype=dtype)


def plain(q, k, v, causal=False, window_left=None, softcap=None, softmax_scale=None, sinks=None, bias=None, alibi_slopes=None):
    """(out, lse) by JAX's operators."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    z = jnp.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        z = softcap * jnp.tanh(z / softcap)
    n, m = z.shape[2:]
    place, key = jnp.arange(m - n, m)[:, None], jnp.arange(m)[None]
    if alibi_slopes is not None:
        z = z - alibi_slopes[:, None, None] * (place - key)
    if bias is not None:
        z = z + bias[:, m - n:, :]
    seen = jnp.ones((n, m), bool)
    if causal:
        seen &= key <= place
    if window_left is not None:
        seen &= key >= place - window_left
    z = jnp.where(seen, z, -jnp.inf)
    lse = jax.nn.logsumexp(z, axis=-1)
    total = lse if sinks is None else jnp.logaddexp(lse, sinks[:, None])
    return jnp.einsum("bhij,bjhd->bihd", jnp.exp(z - total[..., None]), v), lse.transpose(0, 2, 1)


CASES = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window_left": 3}, "softcap": {"softcap": 2.0},
         "scale": {"softmax_scale": 0.5}, "sinks": {"sinks": (4,), "causal": True}, "bias": {"bias": (4, 14, 14)},
         "alibi": {"alibi_slopes": (4,), "causal": True}}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_are_those_of_jax(name, jitted):
    fields = {key: x if not isinstance(x, tuple) else inputs(x, seed=1)[0] for key, x in CASES[name].items()}
    tables = [key for key in fields if key in ("sinks", "bias")]
    arrays = [*qkv(), *(fields.pop(key) for key in tables)]
    dout, dlse = inputs((2, 9, 4, 24), (2, 9, 4), seed=2)

    def loss(function, *arrays):
        out, lse = function(*arrays[:3], **dict(zip(tables, arrays[3:])), **fields)
        return jnp.vdot(out, dout) + jnp.vdot(lse, dlse)

    def ours(*arrays):
        return loss(lambda *x, **fields: attention(*x, return_lse=True, **fields), *arrays)

    places = tuple(range(len(arrays)))
    value, got = (jax.jit if jitted else lambda f: f)(jax.value_and_grad(ours, places))(*arrays)
    want_value, want = jax.value_and_grad(lambda *arrays: loss(plain, *arrays), places)(*arrays)
    assert abs(value - want_value) < 1e-3
    for x, y in zip(got, want):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype):
    arrays = qkv(dtype=dtype)
    got = jax.grad(lambda *x: attention(*x, causal=True).astype(jnp.float32).sum(), (0, 1, 2))(*arrays)
    want = jax.grad(lambda *x: plain(*x, causal=True)[0].sum(), (0, 1, 2))(*(x.astype(jnp.float32) for x in arrays))
    for x, y in zip(got, want):
        assert x.dtype == dtype
        assert np.linalg.norm(x.astype(jnp.float32) - y) < 2e-2 * np.linalg.norm(y)


def test_ragged_rows_without_a_sequence_are_zeros():
    q, k, v = inputs((12, 4, 16), (20, 2, 16), (20, 2, 24))
    offsets = {"cu_seqlens_q": jnp.asarray([0, 3, 3, 9], jnp.int32), "cu_seqlens_kv": jnp.asarray([0, 5, 8, 15], jnp.int32)}

    def both(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True, **offsets)

    (out, lse), pull = jax.vjp(both, q, k, v)
    dout, dlse = inputs(out.shape, lse.shape, seed=3)
    got = pull((dout, dlse))
    assert not out[9:].any() and (lse[9:] == -jnp.inf).all()
    assert not got[0][9:].any() and not got[1][15:].any() and not got[2][15:].any() and not got[1][5:8].any()
    for rows, keys in ((slice(0, 3), slice(0, 5)), (slice(3, 9), slice(8, 15))):
        want, pull_of_one = jax.vjp(lambda *x: plain(*x, causal=True), q[None, rows], k[None, keys], v[None, keys])
        np.testing.assert_allclose(out[rows], want[0][0], rtol=1e-3, atol=2e-5)
        for x, y, part in zip(got, pull_of_one((dout[None, rows], dlse[None, rows])), (rows, keys, keys)):
            np.testing.assert_allclose(x[part], y[0], rtol=1e-3, atol=2e-5)


def test_only_what_is_wanted_is_computed(monkeypatch):
    from attune import _core

    asked = []
    whole = _core.attention_backward
    monkeypatch.setattr(_core, "attention_backward", lambda *x: (asked.append(sorted(x[1])), whole(*x)))
    q, k, v = qkv()
    jax.block_until_ready(jax.grad(lambda k: attention(q, k, v).sum())(k))
    jax.block_until_ready(jax.grad(lambda q: attention(q, k, v, return_lse=True)[1].sum())(q))
    assert asked == [["dk", "dout"], ["dlse", "dout", "dq"]]


def test_under_vmap_and_remat():
    q, k, v = (jnp.stack([x, 2 * x]) for x in qkv())

    def loss(attend, q, k, v):
        return attend(q, k, v).sum()

    got = jax.vmap(jax.grad(lambda *x: loss(attention, *x), (0, 1, 2)))(q, k, v)
    for i in range(2):
        want = jax.grad(lambda *x: loss(lambda *y: plain(*y)[0], *x), (0, 1, 2))(q[i], k[i], v[i])
        for x, y in zip(got, want):
            np.testing.assert_allclose(x[i], y, rtol=1e-3, atol=2e-5)
    again = jax.grad(lambda q: jax.checkpoint(attention)(q, k[0], v[0]).sum())(q[0])
    np.testing.assert_array_equal(again, got[0][0])


def test_what_is_not_covered_is_refused_by_name():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="cache is given: in programs of JAX attention is over dense keys alone"):
        attention(q, k, v, cache=attune.KVCache(None))
    with pytest.raises(ValueError, match="out is given"):
        attention(q, k, v, out=q)
    with pytest.raises(ValueError, match="v is None"):
        attention(q, k, None)
    with pytest.raises(TypeError, match="'is_causal' is not an argument of this operation; did you mean causal"):
        attention(q, k, v, is_causal=True)
    with pytest.raises(TypeError, match="softcap is an array"):
        attention(q, k, v, softcap=jnp.ones(()))
    with pytest.raises(TypeError, match="k is <class 'int'>; an array is expected"):
        attention(q, 3, v)
    with pytest.raises(ValueError, match="k.shape"):
        jax.jit(attention)(q, k[..., :8], v)  # while JAX traces
    with pytest.raises(ValueError, match="alibi_slopes is differentiated, and has no gradient: pass jax.lax.stop_gradient"):
        jax.grad(lambda slopes: attention(q, k, v, alibi_slopes=slopes).sum())(jnp.ones(4))
    wide = inputs((1, 3, 1, 288))[0]
    attention(wide, wide, wide)
    with pytest.raises(attune.Unsupported, match="head_dim_qk: 288"):
        jax.grad(lambda q: attention(q, wide, wide).sum())(wide)
    with pytest.raises(ValueError, match="attention has no second derivative"):
        jax.grad(lambda q: jax.grad(lambda q: attention(q, k, v).sum())(q).sum())(q)


def test_a_traced_program_is_sent_here():
    q, k, v = qkv()
    for program in (jax.jit, jax.vmap, lambda f: jax.grad(lambda *arrays: f(*arrays).sum())):
        with pytest.raises(attune.WrongType, match="an array has no data, as JAX traces it.*integrations.jax.attention"):
            program(attune.attention)(q, k, v)


def test_another_device_is_refused(monkeypatch):
    with jax.default_device(None):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        with pytest.raises(attune.Unsupported, match="JAX array on CUDA"):
            jax.jit(attention).lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv()))
