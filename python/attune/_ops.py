# SPDX-License-Identifier: Apache-2.0
"""The operations beside attention. They need no workspace; on CUDA they only enqueue work on the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from . import _core
from ._errors import InvalidArgument, flag, shape_of, suggesting
from ._frameworks import array_dtype, dtype_name, empty, finish
from ._records import Array, KVCache, Prologue

if TYPE_CHECKING:
    from typing import Literal, overload

    from typing_extensions import Unpack

    from ._records import ArrayT


tracer: Any = None  # set by integrations/torch.py once torch is there


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _tracing() -> bool:
    return tracer is not None and tracer.is_compiling()


def make(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """`empty`, also where torch.compile looks; what it makes goes to the caller by `hand_out`."""
    return tracer.empty(shape, dtype, like) if _tracing() else empty(shape, dtype, like)


def hand_out(array: Any, like: Any) -> Any:
    return array if _tracing() else finish(array, like)


def call(name: str, arguments: dict[str, Any], *more: Any) -> None:
    """An operation of the extension module, or its operator while torch.compile looks. arguments: None where nothing is given. more:
    workspace and stream."""
    if _tracing():
        tracer.call(name, _given(**arguments))
    else:
        getattr(_core, name)(arguments, *more)


def _pair(first: Any, second: Any, like: Any) -> Any:
    return finish(first, like) if second is None else (finish(first, like), finish(second, like))


class PrepareFields(TypedDict, total=False):
    """The keyword arguments of `qkv_prepare`, for type checkers."""

    prologue: Prologue | None
    cu_seqlens_q: Array | None
    seqused_kv: Array | None
    finished: Array | None
    cache: KVCache | None
    q_out: Array | None
    k_out: Array | None
    v_out: Array | None
    out_dtype: Any
    stream: Any


if TYPE_CHECKING:
    @overload
    def qkv_prepare(q: ArrayT, k: ArrayT, v: ArrayT, **fields: Unpack[PrepareFields]) -> tuple[ArrayT, ArrayT, ArrayT]: ...

    @overload
    def qkv_prepare(q: ArrayT, k: ArrayT, v: None = None, **fields: Unpack[PrepareFields]) -> tuple[ArrayT, ArrayT, None]: ...

    @overload
    def qkv_prepare(q: ArrayT, k: None = None, v: None = None, **fields: Unpack[PrepareFields]) -> tuple[ArrayT, None, None]: ...

    @overload
    def qkv_prepare(q: None = None, *, k: ArrayT, v: ArrayT, **fields: Unpack[PrepareFields]) -> tuple[None, ArrayT, ArrayT]: ...

    @overload
    def qkv_prepare(q: ArrayT | None = None, k: ArrayT | None = None, v: ArrayT | None = None,
                    **fields: Unpack[PrepareFields]) -> tuple[ArrayT | None, ArrayT | None, ArrayT | None]: ...


@suggesting
def qkv_prepare(q: Array | None = None, k: Array | None = None, v: Array | None = None, *, prologue: Prologue | None = None,
                cu_seqlens_q: Array | None = None, seqused_kv: Array | None = None, finished: Array | None = None,
                cache: KVCache | None = None, q_out: Array | None = None, k_out: Array | None = None,
                v_out: Array | None = None, out_dtype: Any = None, stream: Any = None) -> Any:
    """The prologue on its own: q, k and v of new tokens to q_out, k_out and v_out, and to the cache if prologue.append.

    Args:
        q, k, v: as in `attention`, each optional.
        cu_seqlens_q: rows of each sequence, for q, k and v alike. seqused_kv: int32 [batch], position of the first new token;
            None: 0. finished: bool [batch].
        q_out, k_out, v_out: float32, float16 or bfloat16, of the inputs' shapes; may be the inputs themselves.
        out_dtype: of outputs that are made here; None: as the input (int8 and float8 need it).

    Returns:
        (q_out, k_out, v_out), None where there is no input.
    """
    arguments = _given(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, seqused_kv=seqused_kv, finished=finished, cache=cache,
                       prologue=prologue)
    if _tracing():
        return tracer.qkv_prepare(arguments, _given(q_out=q_out, k_out=k_out, v_out=v_out), out_dtype)
    outs = []
    for name, given, out in (("q", q, q_out), ("k", k, k_out), ("v", v, v_out)):
        if given is not None and out is None:
            dtype = array_dtype(name, given) if out_dtype is None else dtype_name("out_dtype", out_dtype)
            if out_dtype is None and dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
                raise InvalidArgument(f"out_dtype is None, and {name} is {dtype}: say the dtype of the outputs")
            out = empty(shape_of(name, given), dtype, given)
        outs.append(out)
    _core.qkv_prepare({**arguments, **_given(q_out=outs[0], k_out=outs[1], v_out=outs[2])}, stream)
    return tuple(None if out is None else finish(out, like) for out, like in zip(outs, (q, k, v)))


if TYPE_CHECKING:
    @overload
    def merge(partial_out: ArrayT, partial_lse: Array, *, sinks: Array | None = None, out: Array | None = None,
              out_scale: Array | None = None, lse: None = None, out_dtype: Any = None, return_lse: Literal[False] = False,
              stream: Any = None) -> ArrayT: ...

    @overload
    def merge(partial_out: ArrayT, partial_lse: Array, *, sinks: Array | None = None, out: Array | None = None,
              out_scale: Array | None = None, lse: Array | None = None, out_dtype: Any = None, return_lse: Literal[True],
              stream: Any = None) -> tuple[ArrayT, ArrayT]: ...

    @overload
    def merge(partial_out: ArrayT, partial_lse: Array, *, sinks: Array | None = None, out: Array | None = None,
              out_scale: Array | None = None, lse: Array | None = None, out_dtype: Any = None, return_lse: bool = False,
              stream: Any = None) -> ArrayT | tuple[ArrayT, ArrayT]: ...


@suggesting
def merge(partial_out: Array, partial_lse: Array, *, sinks: Array | None = None, out: Array | None = None,
          out_scale: Array | None = None, lse: Array | None = None, out_dtype: Any = None, return_lse: bool = False,
          stream: Any = None) -> Any:
    """Merges results over disjoint sets of keys: lse = log sum exp lse_i, out = sum exp(lse_i - lse) out_i.

    Args:
        partial_out: [parts, rows, heads, head_dim_v], float32, float16 or bfloat16. partial_lse: float32 [parts, rows, heads];
            a part with -inf counts for nothing.
        sinks: [heads], added once. out: [rows, heads, head_dim_v]; float8_e4m3fn with out_scale. lse: float32 [rows, heads].

    Returns:
        out, or (out, lse) where lse was given or asked for.
    """
    return_lse = flag("return_lse", return_lse)
    if _tracing():
        return tracer.merge({"partial_out": partial_out, "partial_lse": partial_lse, "sinks": sinks, "out": out,
                             "out_scale": out_scale, "lse": lse}, out_dtype, return_lse)
    shape = shape_of("partial_out", partial_out)
    if out is None:
        dtype = array_dtype("partial_out", partial_out) if out_dtype is None else dtype_name("out_dtype", out_dtype)
        out = empty(shape[1:], dtype, partial_out)
    if lse is None and return_lse:
        lse = empty(shape[1:-1], "float32", partial_out)
    _core.merge(dict(partial_out=partial_out, partial_lse=partial_lse, sinks=sinks, out=out, out_scale=out_scale, lse=lse),
                stream)
    return _pair(out, lse, partial_out)


@suggesting
def cache_append(cache: KVCache, k: Array, v: Array | None = None, *, slots: Array | None = None,
                 cu_seqlens: Array | None = None, seqused_kv: Array | None = None, finished: Array | None = None,
                 power_of_two_scales: bool = False, stream: Any = None) -> None:
    """Writes rows to a cache, rounding or quantising once. Scales per token and head are computed and written too.

    Args:
        k, v: [tokens, num_heads_kv, head_dim], float32, float16 or bfloat16; v is None where V is part of K.
        slots: int64 [tokens], page * page_size + offset; negative: skipped. Or:
        seqused_kv: int32 [batch]: token i of sequence b goes to position seqused_kv[b] + i; cu_seqlens: int32 [batch + 1], the
            rows of each sequence; None: one sequence, or one token for each.
        finished: bool [batch], writes nothing. power_of_two_scales: scales of "mla_656", and scales per token and head.
    """
    call("cache_append", dict(cache=cache, k=k, v=v, slots=slots, cu_seqlens=cu_seqlens, seqused_kv=seqused_kv,
                              finished=finished, power_of_two_scales=power_of_two_scales), stream)


@suggesting
def cache_quantize(cache: KVCache, k: Array, v: Array | None = None, *, power_of_two_scales: bool = False,
                   stream: Any = None) -> None:
    """Writes row i of k, v [tokens, num_heads_kv, head_dim] to slot i of the cache."""
    call("cache_quantize", dict(cache=cache, k=k, v=v, power_of_two_scales=power_of_two_scales), stream)


if TYPE_CHECKING:
    @overload
    def cache_dequantize(cache: KVCache, k: ArrayT, v: None = None, *, stream: Any = None) -> ArrayT: ...

    @overload
    def cache_dequantize(cache: KVCache, k: ArrayT, v: ArrayT, *, stream: Any = None) -> tuple[ArrayT, ArrayT]: ...


@suggesting
def cache_dequantize(cache: KVCache, k: Array, v: Array | None = None, *, stream: Any = None) -> Any:
    """Reads slot i of the cache to row i of k, v [tokens, num_heads_kv, head_dim], which are written and returned."""
    call("cache_dequantize", dict(cache=cache, k=k, v=v), stream)
    return k if v is None else (k, v)


if TYPE_CHECKING:
    @overload
    def cache_gather(cache: KVCache, k: ArrayT, v: None = None, *, slots: Array | None = None, cu_seqlens: Array | None = None,
                     seqused_kv: Array | None = None, stream: Any = None) -> ArrayT: ...

    @overload
    def cache_gather(cache: KVCache, k: ArrayT, v: ArrayT, *, slots: Array | None = None, cu_seqlens: Array | None = None,
                     seqused_kv: Array | None = None, stream: Any = None) -> tuple[ArrayT, ArrayT]: ...


@suggesting
def cache_gather(cache: KVCache, k: Array, v: Array | None = None, *, slots: Array | None = None,
                 cu_seqlens: Array | None = None, seqused_kv: Array | None = None, stream: Any = None) -> Any:
    """Reads rows of a cache to k, v [tokens, num_heads_kv, head_dim], which are written and returned.

    Args:
        slots: int64 [tokens]: slots[i] to row i; out of range: zeros. Or:
        seqused_kv: int32 [batch], cu_seqlens: int32 [batch + 1]: the first seqused_kv[b] tokens of sequence b to rows
            cu_seqlens[b]...
    """
    call("cache_gather", dict(cache=cache, k=k, v=v, slots=slots, cu_seqlens=cu_seqlens, seqused_kv=seqused_kv), stream)
    return k if v is None else (k, v)
