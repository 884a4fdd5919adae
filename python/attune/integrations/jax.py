# SPDX-License-Identifier: Apache-2.0
"""Attention over dense keys inside programs of JAX, on the CPU: under `jax.jit`, `jax.vmap` and `jax.grad`.

    from attune.integrations.jax import attention

    gradients = jax.grad(lambda q, k, v: attention(q, k, v, causal=True).sum(), argnums=(0, 1, 2))(q, k, v)

The computation is a callback of the host. What no kernel covers is refused while JAX traces, not while it runs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .. import _attention, _core
from .._errors import InvalidArgument, Unsupported, WrongType, no_array, unknown_argument
from .._frameworks import _Jax, array_dtype
from .._records import Spec
from ._gradients import ARRAYS, GRADIENTS, TABLES, VALUES

if TYPE_CHECKING:
    from typing import Literal, overload

_INPUTS = (*GRADIENTS, *ARRAYS)
_Arrays = dict[str, Any]  # by their names
_Values = tuple[tuple[str, Any], ...]


if TYPE_CHECKING:
    @overload
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: Literal[False] = False, **fields: Any) -> jax.Array: ...

    @overload
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: Literal[True], **fields: Any) -> tuple[jax.Array, jax.Array]: ...

    @overload
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: bool,
                  **fields: Any) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, **fields: Any) -> Any:
    """`attune.attention` over dense keys, as a function that JAX transforms.

    q, k and v: jax.Arrays [total_q, num_heads, head_dim], or [batch, seqlen, num_heads, head_dim], on the CPU: float32, float16 or
    bfloat16. Other arguments are those of `attune.attention` that have a backward: masks (causal, window_left, window_right,
    mask_bits, bidirectional_ranges), scores (softmax_scale, softcap, sinks, alibi_slopes, bias, t5_bias), lengths (cu_seqlens_q,
    cu_seqlens_kv, seqused_kv) and their companions. Numbers and flags are static.

    Differentiable in reverse mode, once: q, k, v, sinks, bias and t5_bias, through out and lse, the same bits in every run.

    Returns out, of q's dtype, or with return_lse (out, lse). Rows that no sequence owns have out = 0 and lse = -inf, and gradients 0.

    Raises InvalidArgument, WrongType and Unsupported as `attune.attention` does; Unsupported on another device than the CPU.
    """
    given = {name: x for name, x in {"q": q, "k": k, "v": v, **fields}.items() if x is not None}
    for name in given:
        if name not in _core.fields["attune_attention"]:
            raise WrongType(unknown_argument(name, (*_INPUTS, *VALUES)))
        if name not in _INPUTS and name not in VALUES:
            raise InvalidArgument(f"{name} is given: in programs of JAX attention is over dense keys alone, and makes its outputs")
    for name in "qkv":
        if name not in given:
            raise InvalidArgument(f"{name} is None: the backward needs q, k and v")
    arrays = {name: _array(name, x) for name, x in given.items() if name in _INPUTS}
    values = tuple((name, x) for name, x in given.items() if name in VALUES)
    for name, x in values:
        if isinstance(x, (jax.Array, np.ndarray)):
            raise WrongType(f"{name} is an array; a number that is known while JAX traces is expected")
    out, lse = _differentiable(values, arrays)
    return (out, lse) if return_lse else out


def _array(name: str, x: Any) -> Any:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise no_array(name, x)
    if _platform(x) != "cpu":
        _Jax.current_stream(x, 0)  # refuses
    return jnp.asarray(x)


def _platform(x: Any) -> str:
    """Where a program with this array will run, as far as it is known."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return next(iter(x.devices())).platform
    chosen = jax.config.jax_default_device
    return str(getattr(chosen, "platform", chosen) or jax.default_backend())


def _specs(arrays: _Arrays, values: _Values) -> dict[str, Any]:
    """The fields of attention without data, outputs too."""
    fields = {name: Spec(x.shape, array_dtype(name, x)) for name, x in arrays.items()}  # type: ignore[arg-type]
    q, k, v = (fields.pop(name) for name in "qkv")
    return _attention._arguments(q, k, v, {**fields, **dict(values)}, None, True, False, specs=True)


def _on_host(arrays: _Arrays, values: _Values) -> dict[str, Any]:
    return {**{name: np.asarray(x) for name, x in arrays.items()}, **dict(values)}


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(function: Any, arrays: _Arrays) -> Any:
    return function(arrays)


@_apply.defjvp
def _no_second(function: Any, primals: Any, tangents: Any) -> Any:
    raise InvalidArgument("attention has no second derivative: its gradients are computed without a graph of their own")


def _call(function: Any, like: Any, arrays: _Arrays) -> Any:
    """The function on the host."""
    return _apply(lambda arrays: jax.pure_callback(function, like, arrays, vmap_method="sequential"), arrays)


def _forward(values: _Values, arrays: _Arrays) -> tuple[Any, Any]:
    specs = _specs(arrays, values)
    covered, reason = _core.supported(specs, None)
    if not covered:
        raise Unsupported(reason)
    q, lse_shape = arrays["q"], specs["lse"].shape

    def run(arrays: _Arrays) -> tuple[Any, Any]:
        out, lse = np.zeros(specs["out"].shape, q.dtype), np.full(lse_shape, -np.inf, np.float32)
        _core.attention({**_on_host(arrays, values), "out": out, "lse": lse}, None, None)
        return out, lse

    return _call(run, (jax.ShapeDtypeStruct(specs["out"].shape, q.dtype), jax.ShapeDtypeStruct(lse_shape, np.float32)), arrays)


_differentiable = jax.custom_vjp(_forward, nondiff_argnums=(0,))


def _with_residuals(values: _Values, arrays: Any) -> tuple[Any, Any]:
    wanted = tuple(name for name, x in arrays.items() if x.perturbed)
    arrays = {name: x.value for name, x in arrays.items()}
    for name in wanted:
        if name not in GRADIENTS:
            raise InvalidArgument(f"{name} is differentiated, and has no gradient: pass jax.lax.stop_gradient({name})")
    specs = _specs(arrays, values)
    made = {GRADIENTS[name]: Spec(specs[name].shape, "float32" if name in TABLES else specs[name].dtype) for name in wanted}
    covered, reason = _core.attention_backward_supported(specs, {"dout": specs["out"], **made}, None)
    if not covered:
        raise Unsupported(reason)
    out, lse = _forward(values, arrays)
    # A tuple that is empty is a residual without arrays.
    return (out, lse), (arrays, {name: () for name in wanted}, out, lse)


def _derivative(values: _Values, residuals: Any, cotangents: Any) -> tuple[_Arrays]:
    arrays, wanted, out, lse = residuals
    given = {name: x for name, x in zip(("dout", "dlse"), cotangents) if not isinstance(x, SymbolicZero)}
    given.setdefault("dout", jnp.zeros_like(out))
    made = _gradients(values, tuple(wanted), {**arrays, "out": out, "lse": lse, **given})
    return ({name: made[name].astype(x.dtype) if name in made else None for name, x in arrays.items()},)


_differentiable.defvjp(_with_residuals, _derivative, symbolic_zeros=True)


def _gradients(values: _Values, wanted: tuple[str, ...], arrays: _Arrays) -> _Arrays:
    """The gradients by the names of what they are of. arrays: the inputs, out, lse, dout and dlse."""
    like = {name: jax.ShapeDtypeStruct(arrays[name].shape, np.float32 if name in TABLES else arrays[name].dtype) for name in wanted}

    def run(arrays: _Arrays) -> _Arrays:
        made = {name: np.zeros(x.shape, x.dtype) for name, x in like.items()}
        given: _Arrays = {name: np.asarray(arrays[name]) for name in ("dout", "dlse") if name in arrays}
        forward = {name: x for name, x in arrays.items() if name not in given}
        given.update((GRADIENTS[name], x) for name, x in made.items())
        _core.attention_backward(_on_host(forward, values), given, None, None)
        return made

    return _call(run, like, arrays)
