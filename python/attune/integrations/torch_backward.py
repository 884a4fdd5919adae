# SPDX-License-Identifier: Apache-2.0
"""Gradients of `attune.attention` in torch: two operators, one of which is the other's derivative.

    attention_with_backward    out and lse of attention over dense keys; differentiable in its first six arguments
    attention_backward         their gradients, by attune_attention_backward

Saved for the backward are the inputs, out and lse, nothing else.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from .. import _attention, _core
from .._errors import InvalidArgument, Unsupported, WrongType
from ._gradients import ARRAYS, GRADIENTS, TABLES, VALUES

_INPUTS = (*GRADIENTS, *ARRAYS)
_PLAIN: dict[str, Any] = {"bool?": bool, "int?": operator.index, "float?": float}  # what the operator takes for numpy's numbers


def wanted(q: Any, k: Any, v: Any, fields: dict[str, Any]) -> bool:
    """Whether torch wants gradients of what has some. Each call of `attention` asks, most of them without gradients."""
    if not torch.is_grad_enabled():
        return False
    for x in (q, k, v):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            return True
    for name, x in fields.items():
        if isinstance(x, torch.Tensor) and x.requires_grad and (name in GRADIENTS or name in VALUES):
            return True
    return False


def attention(arguments: dict[str, Any], out_dtype: Any, return_lse: bool, return_max_logits: bool) -> Any:
    """`attention` with gradients. arguments: those that are not None."""
    if not torch.compiler.is_compiling():
        _refuse_transforms(arguments)
    if "q_rope" in arguments:
        raise InvalidArgument("q_rope is given, and gradients are wanted: queries in two parts have no backward; join them by torch.cat")
    for name, value in arguments.items():
        if name in _INPUTS or name in VALUES:
            if name in _INPUTS and not isinstance(value, torch.Tensor):
                raise WrongType(f"{name} is {type(value)!r}, and {_first_wanted(arguments)} requires grad: gradients need tensors of torch")
            if name not in GRADIENTS and isinstance(value, torch.Tensor) and value.requires_grad:
                raise InvalidArgument(f"{name} requires grad, and has no gradient: pass {name}.detach()")
            continue
        if value is False or name not in _core.fields["attune_attention"] or (name == "head_dim_v" and arguments.get("v") is not None):
            continue  # asks for nothing; or is no argument, which the operator says
        raise InvalidArgument(f"{name} is given, and {_first_wanted(arguments)} requires grad: attention over dense keys alone has "
                              "a backward, and makes its outputs; call it under torch.no_grad(), or detach")
    if return_max_logits:
        raise InvalidArgument(f"return_max_logits is true, and {_first_wanted(arguments)} requires grad: max_logits has no gradient")
    for name in "kv":
        if name not in arguments:
            raise InvalidArgument(f"{name} is None, and {_first_wanted(arguments)} requires grad: the backward needs q, k and v")
    values = {name: value for name, value in arguments.items() if name in VALUES or name not in _core.fields["attune_attention"]}
    if not torch.compiler.is_compiling():
        _core.check_values(arguments)  # in the words of calls without gradients; what passes the operator takes
        values = {name: _PLAIN[VALUES[name]](value) if name in VALUES else value for name, value in values.items()}
    width = arguments.get("head_dim_v")
    if width and width != arguments["v"].shape[-1]:
        raise InvalidArgument(f"head_dim_v is {width}, but v has {arguments['v'].shape[-1]}")
    dtype = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
    out, lse = torch.ops.attune.attention_with_backward(*map(arguments.get, _INPUTS), **values, out_dtype=dtype)
    return (out, lse) if return_lse else out


def _refuse_transforms(arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise InvalidArgument(f"{name} is under a transform of torch.func (grad, jacrev, vmap), which this operation does not "
                                  "serve: torch.autograd.grad does")


def _first_wanted(arguments: dict[str, Any]) -> str:
    return next(name for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.requires_grad)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _prepared(inputs: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    fields = _given({**dict(zip(_INPUTS, inputs)), **values})
    q, k, v = (fields.pop(name) for name in "qkv")
    out_dtype = fields.pop("out_dtype", None)
    return _attention._arguments(q, k, v, fields, out_dtype, True, False)


def _forward(*inputs: Any, **values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = _prepared(inputs, values)
    with torch.no_grad():
        # Whether the device has a backward is said before the forward runs: for rows as _aligned leaves them.
        dense = {name: _dense_spec(arguments[name]) for name in ("q", "k", "v", "out")}
        gradients = {"dout": dense["out"], **{f"d{name}": dense[name] for name in "qkv"}}
        for name in TABLES:
            if name in arguments and arguments[name].requires_grad:
                gradients[GRADIENTS[name]] = _attention._spec(tuple(arguments[name].shape), "float32", arguments[name])
        covered, reason = _core.attention_backward_supported({**arguments, **dense}, gradients, None)
        if not covered:
            raise Unsupported(f"{reason}; under torch.no_grad() the forward alone is asked for")
        _core.attention(arguments, None, None)
    return arguments["out"], arguments["lse"]


def _dense_spec(x: torch.Tensor) -> Any:
    return _attention._spec(tuple(x.shape), str(x.dtype)[6:], x)


def _fake_forward(*inputs: Any, **values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = _prepared(inputs, values)
    return arguments["out"], arguments["lse"]


def _gradients(inputs: tuple[Any, ...], asked: list[bool], zero: bool) -> dict[str, torch.Tensor]:
    """Tensors for the gradients that are asked for. zero: rows that no sequence owns are not written."""
    made = {}
    for (name, gradient), value, ask in zip(GRADIENTS.items(), inputs, asked):
        if ask:
            dtype = torch.float32 if name in TABLES else value.dtype
            made[gradient] = (value.new_zeros if zero else value.new_empty)(value.shape, dtype=dtype)
    return made


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy that the kernels on a GPU take: their rows begin at multiples of 16 bytes, and the gradient of sum() is a view of
    one number."""
    size = x.element_size()
    fits = x.stride(-1) == 1 and all(n * size % 16 == 0 and n > 0 for n in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _results(like: torch.Tensor, made: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """All six gradients: an empty tensor where one was not asked for."""
    return tuple(made[gradient] if gradient in made else like.new_empty(0) for gradient in GRADIENTS.values())


def _backward(asked: list[bool], dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *inputs: Any,
              **values: Any) -> tuple[torch.Tensor, ...]:
    forward = _given({**dict(zip(_INPUTS, inputs)), **values, "out": out, "lse": lse})
    made = _gradients(inputs, asked, "cu_seqlens_q" in forward or "cu_seqlens_kv" in forward)
    with torch.no_grad():
        if dout.is_cuda:
            forward.update((name, _aligned(forward[name])) for name in "qkv")
        _core.attention_backward(forward, {**_given({"dout": _aligned(dout), "dlse": dlse}), **made}, None, None)
    return _results(dout, made)


def _fake_backward(asked: list[bool], dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
                   *inputs: Any, **values: Any) -> tuple[torch.Tensor, ...]:
    return _results(dout, _gradients(inputs, asked, False))


def gradients(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, fields: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of `attention(**fields)`, where autograd does not see the call."""
    values = {name: value for name, value in fields.items() if name in VALUES}
    with torch.no_grad():
        made = torch.ops.attune.attention_backward([name in "qkv" for name in GRADIENTS], dout, None, out, lse,
                                                   *map(fields.get, _INPUTS), **values)
    return tuple(made[:3])


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.values = {name: value for name, value in keyword_only_inputs.items() if name != "out_dtype"}
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    *inputs, out, lse = ctx.saved_tensors
    asked = [bool(x) for x in ctx.needs_input_grad[:len(GRADIENTS)]]
    gradients: list[torch.Tensor | None] = [None] * len(inputs)
    if dout is None and dlse is None:
        return tuple(gradients)
    made = torch.ops.attune.attention_backward(asked, torch.zeros_like(out) if dout is None else dout, dlse, out, lse, *inputs,
                                               **ctx.values)
    for i, gradient in enumerate(made):
        if asked[i]:
            gradients[i] = gradient.to(inputs[i].dtype)
    return tuple(gradients)


def _no_second(ctx: Any, *gradients: Any) -> Any:
    raise InvalidArgument("attention has no second derivative: its gradients are computed without a graph of their own")


def define(library: Any) -> None:
    inputs = ", ".join(f"Tensor {name}" if name in "qkv" else f"Tensor? {name}" for name in _INPUTS)
    values = ", ".join(f"{kind} {name}=None" for name, kind in VALUES.items())
    library.define(f"attention_with_backward({inputs}, *, {values}, ScalarType? out_dtype=None) -> (Tensor, Tensor)")
    library.define(f"attention_backward(bool[] wanted, Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {inputs}, *, {values}) -> "
                   "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
    for name, kernel, fake in (("attention_with_backward", _forward, _fake_forward), ("attention_backward", _backward, _fake_backward)):
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"attune::{name}", fake, lib=library)
    torch.library.register_autograd("attune::attention_with_backward", _derivative, setup_context=_setup, lib=library)
    torch.library.register_autograd("attune::attention_backward", _no_second, lib=library)
