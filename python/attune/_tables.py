# SPDX-License-Identifier: Apache-2.0
"""Tables, built in double on the host and rounded once: arrays of numpy, or of the framework and device of `like`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from . import _core
from ._errors import InvalidArgument, flag, no_array, suggesting, whole
from ._frameworks import framework_of, numpy_empty
from ._records import Array, View

if TYPE_CHECKING:
    from typing import Literal, overload

    import numpy
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._records import ArrayT

    RopeStyle = Literal["none", "linear", "glm2", "dynamic_ntk", "qwen_dynamic_ntk", "yarn", "llama3", "mrope"]


class RopeFields(TypedDict, total=False):
    theta: float
    scale: float
    max_position: int
    seqlen: int
    beta_fast: float
    beta_slow: float
    extrapolation_factor: float
    mscale: float
    low_freq_factor: float
    high_freq_factor: float


def _table(shape: tuple[int, ...], like: Array | None, fill: Any) -> Any:
    if like is not None and not hasattr(like, "shape") and not hasattr(like, "__dlpack__"):
        raise no_array("like", like)
    table: Any = numpy_empty(shape, "float32")
    fill(table)
    return table if like is None else framework_of(like).from_numpy(table, like.array if isinstance(like, View) else like)


def _rotary_width(dim: int) -> int:
    width = whole("dim", dim, least=2, most=2**16)
    if width % 2:
        raise InvalidArgument(f"dim is {width}; it must be even")
    return width


if TYPE_CHECKING:
    @overload
    def rope_table(num_positions: int, dim: int, *, style: RopeStyle = "linear", first_position: int = 0, like: None = None,
                   **fields: Unpack[RopeFields]) -> NDArray[numpy.float32]: ...

    @overload
    def rope_table(num_positions: int, dim: int, *, style: RopeStyle = "linear", first_position: int = 0, like: View,
                   **fields: Unpack[RopeFields]) -> Any: ...

    @overload
    def rope_table(num_positions: int, dim: int, *, style: RopeStyle = "linear", first_position: int = 0, like: ArrayT,
                   **fields: Unpack[RopeFields]) -> ArrayT: ...


def rope_table(num_positions: int, dim: int, *, style: RopeStyle = "linear", first_position: int = 0, like: Array | None = None,
               **fields: Unpack[RopeFields]) -> Any:
    """cos_sin of `Prologue`: float32 [num_positions, dim], dim / 2 cosines, then dim / 2 sines, of each position.

    Args:
        dim: rotary width, even. first_position: of the first row.
        style: "none", "linear", "glm2", "dynamic_ntk", "qwen_dynamic_ntk", "yarn", "llama3", "mrope".
        theta: base (10000). scale: positions are divided by it (1). max_position: original context length (NTK, YaRN, Llama 3).
        seqlen: the length that the table is for (NTK). beta_fast, beta_slow, extrapolation_factor: YaRN. mscale: multiplies
        cosines and sines. low_freq_factor, high_freq_factor: Llama 3.
    """
    arguments = {"style": style, "dim": dim, **fields}
    shape = whole("num_positions", num_positions, most=2**31), _rotary_width(dim)
    first = whole("first_position", first_position, most=2**31)
    return _table(shape, like, lambda out: _core.rope_table(arguments, first, shape[0], out))


def rope_frequencies(dim: int, *, style: RopeStyle = "linear", **fields: Unpack[RopeFields]) -> list[float]:
    """The dim / 2 inverse frequencies, in radians a position; arguments as of `rope_table`."""
    return _core.rope_frequencies({"style": style, "dim": _rotary_width(dim), **fields})


if TYPE_CHECKING:
    @overload
    def logn_table(max_position: int, num_positions: int, *, like: None = None) -> NDArray[numpy.float32]: ...

    @overload
    def logn_table(max_position: int, num_positions: int, *, like: View) -> Any: ...

    @overload
    def logn_table(max_position: int, num_positions: int, *, like: ArrayT) -> ArrayT: ...


@suggesting
def logn_table(max_position: int, num_positions: int, *, like: Array | None = None) -> Any:
    """float32 [num_positions]: ln(p + 1) / ln(max_position) for p > max_position, else 1."""
    most, count = whole("max_position", max_position), whole("num_positions", num_positions, most=2**31)
    return _table((count,), like, lambda out: _core.logn_table(most, count, out))


if TYPE_CHECKING:
    @overload
    def alibi_slopes(num_heads: int, *, like: None = None) -> NDArray[numpy.float32]: ...

    @overload
    def alibi_slopes(num_heads: int, *, like: View) -> Any: ...

    @overload
    def alibi_slopes(num_heads: int, *, like: ArrayT) -> ArrayT: ...


@suggesting
def alibi_slopes(num_heads: int, *, like: Array | None = None) -> Any:
    """float32 [num_heads]: the slopes of the ALiBi paper. They are positive and are added times key - query."""
    count = whole("num_heads", num_heads, least=1, most=2**16)
    return _table((count,), like, lambda out: _core.alibi_slopes(count, out))


@suggesting
def t5_bucket(relative_position: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The T5 bucket of key position - query position."""
    return _core.t5_bucket(whole("relative_position", relative_position, least=-(2**63)), whole("num_buckets", num_buckets),
                           whole("max_distance", max_distance), flag("bidirectional", bidirectional))


@suggesting
def kv_page_bytes(format: Literal["mla_656", "mla_584"], page_size: int) -> int:
    """Bytes of one page of "mla_656" or "mla_584", padding included."""
    return _core.kv_page_bytes(format, whole("page_size", page_size))
