# SPDX-License-Identifier: Apache-2.0
"""Operators of torch: `torch.ops.attune.*`, so that torch.compile sees one node where `attune.attention` is called.

Loaded by itself as soon as attune meets torch. The schemas are made from the fields of the C structs: `cache.k` of a KVCache is
the operator's argument `cache_k`. Attention has four operators, by what they write:

    attention            makes its outputs                attention_append       ... and appends to the cache
    attention_out        writes those that are given      attention_append_out

The two of torch_backward.py have gradients. The operations beside attention have one each, which writes what it is given; merge makes its outputs.

torch allows 64 arguments. So the fields of extra_cache and of the prologue are carried in two: `more_arrays`, and `more_names` with
the arrays' names ("prologue_q_bias"), then the other fields ("prologue_append=1").
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _attention, _core, _ops
from .._errors import InvalidArgument, WrongType, unknown_argument
from .._records import KVCache, Prologue
from . import torch_backward

_SCHEMA_TYPES = {"array": "Tensor?", "output": "Tensor?", "pool": "Tensor?", "bool": "bool?", "int": "int?", "float": "float?",
                 "ints": "int[]?", "str": "str?"}
_RECORDS: dict[str, tuple[str, Any]] = {"cache": ("attune_kv_cache", KVCache), "prologue": ("attune_prologue", Prologue)}
_CARRIED = ("extra_cache_", "prologue_")
_OUTPUTS = ("out", "lse", "max_logits")
_library = torch.library.Library("attune", "DEF")


def _flat(struct: str) -> dict[str, tuple[str, str | None, str]]:
    """Argument -> (kind, the record that it belongs to, name in that record)."""
    found: dict[str, tuple[str, str | None, str]] = {}
    for name, kind in _core.fields[struct].items():
        if kind in _RECORDS:
            for inner, inner_kind in _core.fields[_RECORDS[kind][0]].items():
                found[f"{name}_{inner}"] = (inner_kind, name, inner)
        else:
            found[name] = (kind, None, name)
    return found


def _flatten(arguments: dict[str, Any]) -> dict[str, Any]:
    """What an operator takes for the arguments of a function."""
    flat: dict[str, Any] = {}
    arrays, names, values = [], [], []
    for name, value in arguments.items():
        if not isinstance(value, (KVCache, Prologue)):
            if value is not None:
                flat[name] = value
            continue
        for inner in value.__slots__:
            given, full = getattr(value, inner), f"{name}_{inner}"
            if given is None:
                continue
            if not full.startswith(_CARRIED):
                flat[full] = given
            elif isinstance(given, torch.Tensor):
                arrays.append(given)
                names.append(full)
            else:
                values.append(f"{full}={','.join(map(str, given)) if isinstance(given, tuple) else given}")
    if names or values:
        flat["more_arrays"], flat["more_names"] = arrays, names + values
    return flat


_PARSERS: dict[str, Any] = {"bool": lambda text: text in ("True", "1"), "int": int, "str": str,
            "ints": lambda text: tuple(map(int, text.split(",")))}


def _nest(struct: str, flat: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function for those of an operator."""
    layout = _LAYOUTS[struct]
    flat = dict(flat)
    arrays, names = flat.pop("more_arrays", None) or [], flat.pop("more_names", None) or []
    flat.update(zip(names, arrays))
    for pair in names[len(arrays):]:
        name, _, value = pair.partition("=")
        flat[name] = _PARSERS[layout[name][0]](value)
    arguments: dict[str, Any] = {}
    for name, value in flat.items():
        if value is None:
            continue
        if name not in layout:
            raise InvalidArgument(f"more_names holds '{name}', which is no field of extra_cache or of the prologue")
        _, record, inner = layout[name]
        if record is None:
            arguments[name] = value
            continue
        if record not in arguments:
            made = _RECORDS["cache" if record.endswith("cache") else record]
            arguments[record] = made[1](None) if made[1] is KVCache else made[1]()  # type: ignore[arg-type]
        setattr(arguments[record], inner, value)
    return arguments


_LAYOUTS = {struct: _flat(struct) for struct in
            ("attune_attention", "attune_qkv_prepare", "attune_merge", "attune_cache_op", "attune_indexer")}


def _define(name: str, struct: str, required: tuple[str, ...], written: tuple[str, ...], options: str, returns: str, run: Any,
            fake: Any) -> None:
    """One operator. written: arguments that it writes; other outputs are its results."""
    layout = {argument: kind for argument, (kind, _, _) in _LAYOUTS[struct].items()
              if not argument.startswith(_CARRIED) and (kind != "output" or argument in written or argument in required)}
    letters = iter("abcdefgh")

    def parameter(argument: str) -> str:
        kind = _SCHEMA_TYPES[layout[argument]]
        if argument in required:
            kind = kind.replace("?", "")
        if argument in written:
            kind = kind.replace("Tensor", f"Tensor({next(letters)}!)")
        return f"{kind} {argument}" if argument in required else f"{kind} {argument}=None"

    parameters = [*map(parameter, required), "*", *(parameter(argument) for argument in layout if argument not in required)]
    if "prologue" in _core.fields[struct]:
        parameters.append("Tensor[]? more_arrays=None, str[]? more_names=None")
    if options:
        parameters.append(options)
    _library.define(f"{name}({', '.join(parameters)}) -> {returns}")
    _library.impl(name, _kernel(required, run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"attune::{name}", _kernel(required, fake), lib=_library)


def _kernel(required: tuple[str, ...], function: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return function({**dict(zip(required, args)), **kwargs})

    return kernel


# ----------------------------------------------------------------------------------------------------------- attention


def _options(flat: dict[str, Any]) -> tuple[Any, bool, bool]:
    return flat.pop("out_dtype", None), flat.pop("return_lse", False), flat.pop("return_max_logits", False)


def _prepared(flat: dict[str, Any]) -> dict[str, Any]:
    flat = dict(flat)
    out_dtype, return_lse, return_max_logits = _options(flat)
    fields = _nest("attune_attention", flat)
    q, k, v = (fields.pop(name, None) for name in "qkv")
    return _attention._arguments(q, k, v, fields, out_dtype, return_lse, return_max_logits)


def _results(arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """All three outputs: an empty tensor where one was not asked for."""
    q = arguments["q"]
    return tuple(q.new_empty(0) if arguments.get(name) is None else arguments[name] for name in _OUTPUTS)


def _run_attention(flat: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    arguments = _prepared(flat)
    with torch.no_grad():  # `attention` has asked for gradients already, under the compiler too
        _core.attention(arguments, None, None)
    return _results(arguments)


def _run_attention_out(flat: dict[str, Any]) -> None:
    with torch.no_grad():
        _core.attention(_nest("attune_attention", flat), None, None)


_POOLS = ("cache_k", "cache_v", "cache_k_scale", "cache_v_scale")
_MAKE = "ScalarType? out_dtype=None, bool return_lse=False, bool return_max_logits=False"
for _name, _pools in (("attention", ()), ("attention_append", _POOLS)):
    _define(_name, "attune_attention", ("q",), _pools, _MAKE, "(Tensor, Tensor, Tensor)", _run_attention,
            lambda flat: _results(_prepared(flat)))
    _define(_name + "_out", "attune_attention", ("q", "out"), (*_OUTPUTS, *_pools), "", "()", _run_attention_out,
            lambda flat: None)


def _traced_attention(q: Any, k: Any, v: Any, fields: Any, out_dtype: Any, return_lse: bool, return_max_logits: bool) -> Any:
    """`attention` while torch.compile looks, or where torch wants gradients."""
    for name in fields:
        if name not in _core.fields["attune_attention"]:
            raise WrongType(unknown_argument(name, _core.fields["attune_attention"]))
    if torch_backward.wanted(q, k, v, fields):
        arguments = {name: value for name, value in {"q": q, "k": k, "v": v, **fields}.items() if value is not None}
        return torch_backward.attention(arguments, out_dtype, return_lse, return_max_logits)
    flat = _flatten({"q": q, "k": k, "v": v, **fields})
    _refuse_gradients(flat)
    appends = fields.get("prologue") is not None and bool(fields["prologue"].append)
    dtype = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
    if not any(name in flat for name in _OUTPUTS):
        operator = torch.ops.attune.attention_append if appends else torch.ops.attune.attention
        out, lse, max_logits = operator(**flat, out_dtype=dtype, return_lse=return_lse, return_max_logits=return_max_logits)
        results = [out] + ([lse] if return_lse else []) + ([max_logits] if return_max_logits else [])
    else:
        rows = q.shape[:-1]
        if "out" not in flat:
            flat["out"] = q.new_empty((*rows, _attention._head_dim_v(v, fields)), dtype=dtype)
        if return_lse and "lse" not in flat:
            flat["lse"] = q.new_empty(rows, dtype=torch.float32)
        if return_max_logits and "max_logits" not in flat:
            flat["max_logits"] = q.new_empty(rows, dtype=torch.float32)
        operator = torch.ops.attune.attention_append_out if appends else torch.ops.attune.attention_out
        operator(**flat)
        results = [flat[name] for name in _OUTPUTS if name in flat]
    return results[0] if len(results) == 1 else tuple(results)


def _refuse_gradients(flat: dict[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    more = zip(flat.get("more_names", ()), flat.get("more_arrays", ()))
    for name, value in [*flat.items(), *more]:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise InvalidArgument(f"{name} requires grad, and this operation has no backward: call it under torch.no_grad(), or "
                                  f"pass {name}.detach()")


# ---------------------------------------------------------------------------------------------------- other operations


def _run_merge(flat: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    flat = dict(flat)
    out_dtype = flat.pop("out_dtype", None)
    with torch.no_grad():
        return _ops.merge(**flat, out_dtype=out_dtype, return_lse=True)


def _fake_merge(flat: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    partial = flat["partial_out"]
    return (partial.new_empty(partial.shape[1:], dtype=flat.get("out_dtype") or partial.dtype),
            partial.new_empty(partial.shape[1:-1], dtype=torch.float32))


_define("merge", "attune_merge", ("partial_out", "partial_lse"), (), "ScalarType? out_dtype=None", "(Tensor, Tensor)", _run_merge,
        _fake_merge)


def _define_writer(name: str, struct: str, required: tuple[str, ...], written: tuple[str, ...]) -> None:
    """An operator for an operation of the extension module that writes only what it is given."""
    workspace = (None,) if struct == "attune_indexer" else ()

    def run(flat: dict[str, Any]) -> None:
        with torch.no_grad():
            getattr(_core, name)(_nest(struct, flat), *workspace, None)

    _define(name, struct, required, written, "", "()", run, lambda flat: None)


_define_writer("qkv_prepare", "attune_qkv_prepare", (), ("q_out", "k_out", "v_out", *_POOLS))
_define_writer("cache_append", "attune_cache_op", ("k",), _POOLS)
_define_writer("cache_quantize", "attune_cache_op", ("k",), _POOLS)
_define_writer("cache_dequantize", "attune_cache_op", ("k",), ("k", "v"))
_define_writer("cache_gather", "attune_cache_op", ("k",), ("k", "v"))
_define_writer("indexer_topk", "attune_indexer", ("q", "weights", "indices", "topk_length"), ("indices", "topk_length"))
_define_writer("indexer_scores", "attune_indexer", ("q", "weights", "scores"), ("scores",))
_define_writer("indexer_select", "attune_indexer", ("scores", "indices", "topk_length"), ("indices", "topk_length"))


def _traced_merge(arguments: dict[str, Any], out_dtype: Any, return_lse: bool) -> Any:
    if arguments.get("out") is not None or arguments.get("lse") is not None:
        raise InvalidArgument("out or lse is given: under torch.compile merge makes its outputs")
    _refuse_gradients(arguments)
    given = {name: value for name, value in arguments.items() if value is not None}
    dtype = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
    out, lse = torch.ops.attune.merge(**given, out_dtype=dtype)
    return (out, lse) if return_lse else out


def _traced_call(name: str, arguments: dict[str, Any]) -> None:
    flat = _flatten(arguments)
    _refuse_gradients(flat)
    getattr(torch.ops.attune, name)(**flat)


def _traced_empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    return like.new_empty(shape, dtype=getattr(torch, dtype))


_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _traced_qkv_prepare(arguments: dict[str, Any], outs: dict[str, Any], out_dtype: Any) -> Any:
    dtype = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
    for name in "qkv":
        given = arguments.get(name)
        if given is None or f"{name}_out" in outs:
            continue
        if dtype is None and given.dtype in _CODES:
            raise InvalidArgument(f"out_dtype is None, and {name} is {given.dtype}: say the dtype of the outputs")
        outs[f"{name}_out"] = given.new_empty(given.shape, dtype=dtype)
    _traced_call("qkv_prepare", {**arguments, **outs})
    return tuple(outs.get(f"{name}_out") for name in "qkv")


class _Tracer:
    """What the package calls instead of the extension module while torch.compile traces."""

    is_compiling = staticmethod(torch.compiler.is_compiling)
    attention = staticmethod(_traced_attention)
    wants_gradients = staticmethod(torch_backward.wanted)
    merge = staticmethod(_traced_merge)
    qkv_prepare = staticmethod(_traced_qkv_prepare)
    empty = staticmethod(_traced_empty)
    call = staticmethod(_traced_call)


torch_backward.define(_library)
_attention.tracer = _ops.tracer = _Tracer
