# SPDX-License-Identifier: Apache-2.0
"""The one operation, in one call or by a plan."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any, TypedDict

from . import _core
from ._errors import InvalidArgument, Unsupported, WrongType, flag
from ._frameworks import array_dtype, dtype_name, empty, finish, framework_of
from ._records import Array, KVCache, Prologue, parse_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Unpack

    from typing import Literal, overload

    from ._records import ArrayT, View


tracer: Any = None  # set by integrations/torch.py once torch is there


# The keyword arguments, for type checkers; the docstring of `attention` says what they mean.
class AttentionInputs(TypedDict, total=False):
    """Without the outputs that make `attention` return a tuple."""

    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None
    cache: KVCache | None
    seqused_kv: Array | None
    indices: Array | None
    topk_length: Array | None
    extra_cache: KVCache | None
    extra_indices: Array | None
    extra_topk_length: Array | None
    cache_indirection: Array | None
    beam_prompt_length: Array | None
    beam_width: int | None
    causal: bool | None
    window_left: int | None
    window_right: int | None
    mask_bits: Array | None
    mask_start: Array | None
    bidirectional_ranges: Array | None
    finished: Array | None
    skip_decode: bool | None
    zero_finished: bool | None
    softmax_scale: float | None
    softcap: float | None
    alibi_slopes: Array | None
    alibi_sqrt: bool | None
    bias: Array | None
    new_token_bias: Array | None
    t5_bias: Array | None
    t5_max_distance: int | None
    t5_bidirectional: bool | None
    sinks: Array | None
    prologue: Prologue | None
    out: Array | None
    out_scale: Array | None
    head_dim_v: int | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    batch_invariant: bool | None
    allow_tf32: bool | None
    q_rope: Array | None


class AttentionFields(AttentionInputs, total=False):
    lse: Array | None
    max_logits: Array | None


class PlanChanges(AttentionFields, total=False):
    q: Array
    k: Array | None
    v: Array | None
    stream: object


if TYPE_CHECKING:
    @overload
    def attention(q: View, k: Array | None = None, v: Array | None = None, *, out_dtype: Any = None, return_lse: bool = False,
                  return_max_logits: bool = False, workspace: Array | None = None, stream: Any = None,
                  **fields: Unpack[AttentionFields]) -> Any: ...

    @overload
    def attention(q: ArrayT, k: Array | None = None, v: Array | None = None, *, out_dtype: Any = None,
                  return_lse: Literal[False] = False, return_max_logits: Literal[False] = False, workspace: Array | None = None,
                  stream: Any = None, **fields: Unpack[AttentionInputs]) -> ArrayT: ...

    @overload
    def attention(q: ArrayT, k: Array | None = None, v: Array | None = None, *, out_dtype: Any = None, return_lse: Literal[True],
                  return_max_logits: Literal[False] = False, workspace: Array | None = None, stream: Any = None,
                  **fields: Unpack[AttentionInputs]) -> tuple[ArrayT, ArrayT]: ...

    @overload
    def attention(q: ArrayT, k: Array | None = None, v: Array | None = None, *, out_dtype: Any = None, return_lse: Literal[True],
                  return_max_logits: Literal[True], workspace: Array | None = None, stream: Any = None,
                  **fields: Unpack[AttentionInputs]) -> tuple[ArrayT, ArrayT, ArrayT]: ...

    @overload
    def attention(q: ArrayT, k: Array | None = None, v: Array | None = None, *, out_dtype: Any = None, return_lse: bool = False,
                  return_max_logits: bool = False, workspace: Array | None = None, stream: Any = None,
                  **fields: Unpack[AttentionFields]) -> ArrayT | tuple[ArrayT, ...]: ...


def attention(q: Array, k: Array | None = None, v: Array | None = None, *, out_dtype: Any = None, return_lse: bool = False,
              return_max_logits: bool = False, workspace: Array | None = None, stream: Any = None,
              **fields: Unpack[AttentionFields]) -> Any:
    """softmax(softmax_scale * q k^T + ...) v, for every way an engine keeps its keys and values.

    The order of axes is [batch, seqlen, heads, head_dim], tokens before heads. torch's scaled_dot_product_attention has
    [batch, heads, seqlen, head_dim]: pass x.swapaxes(1, 2), a view, or call `sdpa`. What can only be that order is refused; where
    shapes allow both it is not seen.

    Arrays are torch, numpy, CuPy or JAX arrays, or anything with __dlpack__; all of one call are on one device. They are
    neither copied nor converted, and strides are free. bfloat16 and float8 arrays of numpy are those of ml_dtypes, or
    `View(array, "bfloat16")`. On CUDA the call only enqueues work, on the framework's current stream (or `stream`).

    Sequence b has n queries and s keys; its query i stands at position s - n + i. Keys come from
        k, v                 dense: s = their extent, or seqused_kv
        cache                contiguous or paged: s = seqused_kv
        cache and k, v       k, v are the new tokens (those of q), after seqused_kv older ones
        indices              the listed slots of the cache (or tokens of k, v) only
    docs/semantics.md has the formulas.

    Tensors of torch that require grad get gradients: q, k, v, sinks, bias and t5_bias, of out and lse, over dense keys; the same
    bits in every run (`torch.ops.attune.attention_with_backward`).

    Args:
        q: [total_q, num_heads_q, head_dim_qk] or [batch, seqlen_q, num_heads_q, head_dim_qk]. float32, float16, bfloat16; int8
            and float8 with prologue.qkv_scale.
        q_rope: the last channels of the queries apart from the others, as latent attention computes them: as q but for the last
            axis, float32, float16 or bfloat16; head_dim_qk is what both have together. On CUDA 64 channels beside 512, over latent
            caches. Without a prologue, and without gradients.
        k: [total_kv, num_heads_kv, head_dim_qk] or [batch, seqlen_kv, num_heads_kv, head_dim_qk].
        v: the same with head_dim_v; None: the first head_dim_v columns of k.
        cu_seqlens_q: int32 [batch + 1], the rows of each sequence in q of rank 3. None: one sequence, or with a cache one query
            for each. cu_seqlens_kv: the same for k, v without a cache; None: as cu_seqlens_q.
        cache: a KVCache. seqused_kv: int32 [batch], tokens in it, the new ones not counted; without a cache, keys in use.
        indices: int32 [total_q, topk] or [total_q, num_heads_kv, topk] (rank 4 q: [batch, seqlen_q, topk]): slots
            (page * page_size + offset) of the cache, or tokens of k, v; out of range: ignored. topk_length: int32 [batch] or
            [total_q], entries in use. extra_cache, extra_indices, extra_topk_length: a second pool in the same softmax.
        cache_indirection: int32 [batch, max_seqlen], the beam that holds each position from beam_prompt_length (int32
            [batch]) on; beam_width: beams a request.
        causal: a query sees keys at its position and before. window_left, window_right: how many keys to each side it sees
            beside its own; -1 or None: no limit.
        mask_bits: uint8 [total_q, bytes] or [total_q, num_heads_q, bytes]: bit j % 8 of byte j // 8 lets key mask_start + j
            through; mask_start: int32 [batch].
        bidirectional_ranges: int32 [batch, ranges, 2], inclusive; what lies inside one range sees each other.
        finished: bool [batch]: no output and no append. skip_decode: sequences with one query are left out. Their rows of
            out are not written, or are 0 with zero_finished.
        softmax_scale: None: 1 / sqrt(head_dim_qk). softcap: cap * tanh(z / cap).
        alibi_slopes: float32 [num_heads_q] or [batch, num_heads_q]; alibi_sqrt: - slope * sqrt(distance) instead.
        bias: [num_heads_q or 1, positions, keys]. new_token_bias: [rows, cols], between the new tokens (a speculative tree).
        t5_bias: [num_heads_q, num_buckets], with t5_max_distance and t5_bidirectional.
        sinks: [num_heads_q], one more logit of the denominator.
        prologue: a Prologue: what happens to q and to the new k, v first (bias, RoPE, append to the cache, ...).
        out: as q, last axis head_dim_v; float32, float16, bfloat16 or float8_e4m3fn (then out = saturate(o * out_scale),
            out_scale float32 [1]). lse, max_logits: float32, as q without its last axis. What is given is written and returned.
        head_dim_v: where V is part of K. max_seqlen_q, max_seqlen_kv: most queries and keys of a sequence, where known.
        batch_invariant: a sequence's bits do not depend on the rest of the batch. allow_tf32: for float32 inputs.
        out_dtype: of an `out` that is made here; None: as q. Rows that no sequence owns are left uninitialised in it.
        return_lse, return_max_logits: make and return these too.
        workspace: uint8, aligned to 256 bytes; None: allocated by the framework. stream: of CUDA; None: the current one.

    Returns:
        out; or a tuple of out, lse and max_logits, as far as they were given or asked for. lse is the natural logarithm, without
        sinks. A row that sees nothing has out = 0 and lse = max_logits = -inf.

    Raises:
        InvalidArgument (a ValueError): shape, stride, device or value, by the name of the argument. WrongType (a TypeError).
        Unsupported (a NotImplementedError): no kernel of the device covers it. Error: the device failed.
    """
    return_lse, return_max_logits = flag("return_lse", return_lse), flag("return_max_logits", return_max_logits)
    if tracer is None:
        framework_of(q)  # which sets it if that is torch
    if tracer is not None:
        grad = tracer.wants_gradients(q, k, v, fields)
        if grad and (workspace is not None or stream is not None):
            raise InvalidArgument(f"{'stream' if workspace is None else 'workspace'} is given, and gradients are wanted: torch's "
                                  "current stream and its memory serve them")
        if grad or tracer.is_compiling():
            return tracer.attention(q, k, v, fields, out_dtype, return_lse, return_max_logits)
    try:
        arguments = _arguments(q, k, v, fields, out_dtype, return_lse, return_max_logits)
        return finish(_core.attention(arguments, workspace, stream), q)
    except Exception:
        for name, value in (("q", q), ("k", k), ("v", v), ("q_rope", fields.get("q_rope"))):
            if getattr(value, "is_nested", False) is True:
                raise Unsupported(f"{name} is a nested tensor; cu_seqlens_q and cu_seqlens_kv are for ragged sequences") from None
        raise


class Plan(_core.Plan):
    """A kernel chosen and a workspace allocated for one kind of call, to run it again and again.

        plan = attune.Plan(q, cache=cache, seqused_kv=lengths, out=out)
        plan.run()                             # on the same arrays, whose contents may have changed
        plan.run(q=q2, cache=layer2, out=out2) # on other arrays of the same kind

    Takes the arguments of `attention`; their shapes are the most that later runs may use, and dtypes, heads and features stay. q, q_rope
    and out of a run may have heads and channels as one axis, [..., num_heads * head_dim], as models have them.
    Data may be absent (`Spec`); where all are, on CUDA, the workspace is torch's or cupy's, whichever is imported. Outputs that are not
    given are allocated once, belong to the plan and are overwritten by the next run. `run(**changes)` takes other arguments for one run
    and returns the outputs, as `attention` does; `schedule` and `run_scheduled` are its halves: one schedule (or run) serves every
    layer of a step that has the same lengths. Without one, or after another plan has used the workspace, `run_scheduled` raises Error;
    after lengths changed it does on the CPU, and gives NaN on CUDA. A run allocates nothing, copies nothing and reads nothing back: it
    may be captured into a CUDA graph, and a replay with other lengths and pages in the same arrays is right. One run at a time; on
    CUDA, runs of one plan belong on one stream.
    """

    def __init__(self, q: Array, k: Array | None = None, v: Array | None = None, *, out_dtype: Any = None,
                 return_lse: bool = False, return_max_logits: bool = False, workspace: Array | None = None,
                 **fields: Unpack[AttentionFields]) -> None:
        wanted = flag("return_lse", return_lse), flag("return_max_logits", return_max_logits)
        _core.Plan.__init__(self, _arguments(q, k, v, fields, out_dtype, *wanted), workspace)

    def __repr__(self) -> str:
        return f"<attune.Plan: {self.describe().strip()}>"


class Support:
    """The answer of `supported`: true or false, and `reason`."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return not self.reason

    def __repr__(self) -> str:
        return "Support()" if self else f"Support(reason={self.reason!r})"


def supported(q: Array, k: Array | None = None, v: Array | None = None, *, device: str | None = None,
              capability: tuple[int, int] | None = None, out_dtype: Any = None, **fields: Unpack[AttentionFields]) -> Support:
    """Whether a kernel covers a call; if not, `reason` names the nearest one and what differs. Takes `Spec`s too.

    device: "cpu", "cuda", "cuda:1"; None: where the arrays are. capability: instead of a device, any NVIDIA GPU of that compute
    capability, e.g. (8, 0); none need be there. Raises InvalidArgument for what is wrong on every device.
    """
    arguments = _arguments(q, k, v, fields, out_dtype, False, False, specs=True)
    if capability is not None:
        if device is not None:
            raise InvalidArgument(f"device={device!r} and capability={capability!r} are given; one of them is expected")
        covered, reason = _core.supported_by_capability(arguments, _capability(capability))
        return Support("" if covered else reason)
    covered, reason = _core.supported(arguments, None if device is None else parse_device(device))
    return Support("" if covered else reason)


def _capability(pair: Any) -> int:
    try:
        major, minor = map(index, pair)
    except (TypeError, ValueError):
        raise WrongType(f"capability is {pair!r}; a pair is expected, e.g. (8, 0)") from None
    if not (0 <= major < 100 and 0 <= minor < 10):
        raise InvalidArgument(f"capability is {pair!r}; a major number of 0..99 and a minor of 0..9 are allowed")
    return 10 * major + minor


def validate(q: Array, k: Array | None = None, v: Array | None = None, *, out_dtype: Any = None, stream: Any = None,
             **fields: Unpack[AttentionFields]) -> None:
    """Reads lengths, page tables and indices, and raises Error naming the first wrong entry. Waits for the device."""
    _core.validate(_arguments(q, k, v, fields, out_dtype, False, False), stream)


def warm(calls: Iterable[dict[str, Any]], *, device: str | None = None) -> None:
    """Compiles or loads the kernels of later calls now, side by side. Each call: the arguments of `attention` as a dict."""
    arguments = []
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise WrongType(f"calls[{i}] is {call!r}; a dict of the arguments of attention is expected")
        fields = dict(call)
        arguments.append(_arguments(fields.pop("q", None), fields.pop("k", None), fields.pop("v", None), fields,
                                    fields.pop("out_dtype", None), False, False, specs=True))
    _core.warm(arguments, None if device is None else parse_device(device))


def _arguments(q: Any, k: Any, v: Any, fields: Any, out_dtype: Any, return_lse: bool, return_max_logits: bool,
               specs: bool = False) -> dict[str, Any]:
    """The descriptor's fields, with outputs made where they are not given."""
    fields["q"] = q
    if k is not None:
        fields["k"] = k
    if v is not None:
        fields["v"] = v
    try:
        rows = (*q.shape,)[:-1]
    except Exception:
        if fields.get("out") is None and hasattr(q, "__dlpack__") and not hasattr(q, "shape"):
            raise InvalidArgument(f"out is absent; it is needed, as q, which is {type(q)}, has no shape to make it of") from None
        return fields  # no array: the core says so
    make = _spec if specs else empty
    if fields.get("out") is None:
        dtype = array_dtype("q", q) if out_dtype is None else dtype_name("out_dtype", out_dtype)
        if dtype in ("int8", "float8_e4m3fn", "float8_e5m2") and out_dtype is None:
            raise InvalidArgument(f"out_dtype is None, and q is {dtype}: say the dtype of the output")
        width = _head_dim_v(v, fields)
        if width is None:
            return fields  # the core says why
        fields["out"] = make((*rows, width), dtype, q)
    if return_lse and fields.get("lse") is None:
        fields["lse"] = make(rows, "float32", q)
    if return_max_logits and fields.get("max_logits") is None:
        fields["max_logits"] = make(rows, "float32", q)
    return fields


def _spec(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    from ._records import Spec

    spec = Spec(shape, dtype)
    device: Any = getattr(like, "device", None)
    if type(like) is Spec:
        spec.cuda, spec.index = like.cuda, like.index
    elif getattr(device, "type", "cpu") == "cuda":
        spec.cuda, spec.index = True, device.index or 0
    return spec


def _head_dim_v(v: Any, fields: dict[str, Any]) -> int | None:
    """The width of a row of the output; None where what it follows from is wrong."""
    try:
        if fields.get("head_dim_v"):
            width = index(fields["head_dim_v"])
            return width if 0 < width < 2**16 else None
        if v is not None:
            return v.shape[-1]
        cache = fields.get("cache")
        if cache is not None and cache.v is not None:
            return cache.v.shape[2 if cache.layout == "xpacked" else -1]
        if cache is not None and (cache.k is None or cache.format not in (None, "plain")):
            return 512 if cache.format in (None, "plain", "mla_656", "mla_584") else None
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    if cache is None and fields.get("k") is None:
        raise InvalidArgument("k and cache are absent; one of them is needed")
    raise InvalidArgument("v and head_dim_v are absent; one of them is needed, V being the first head_dim_v columns of K without v")
