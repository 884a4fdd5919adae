# SPDX-License-Identifier: Apache-2.0
"""What goes into a call beside plain arrays: caches, prologues, views with a stated dtype, shapes without data."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from ._errors import InvalidArgument, WrongType, suggesting

if TYPE_CHECKING:
    from typing import Literal, Protocol, TypeVar

    class Array(Protocol):
        """torch.Tensor, numpy.ndarray, cupy.ndarray, jax.Array, View, Spec, or any object with __dlpack__."""

        @property
        def shape(self) -> Any: ...

        @property
        def dtype(self) -> Any: ...

    ArrayT = TypeVar("ArrayT", bound=Array)  # results are of the first argument's framework
    Format = Literal["plain", "mla_656", "mla_584"]
    Layout = Literal["nhd", "hnd", "xpacked", "bytes"]
    DtypeName = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool", "int32", "int64"]
else:
    Array = object


class _Record:
    __slots__: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = []
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None:
                continue
            shape = getattr(value, "shape", None)
            shown.append(f"{name}={value!r}" if shape is None else f"{name}={getattr(value, 'dtype', '')}{list(shape)}")
        return f"{type(self).__name__}({', '.join(shown)})"


class KVCache(_Record):
    """Keys and values of the past, as they lie in memory; nothing is copied, and the arrays are read anew in every call.

    Paged where there is a `page_table`, contiguous where there is none (sequence b owns row b, or row `batch_index[b]`), or,
    with `indices`, a pool of slots. "pages" below is the batch of a contiguous cache.

    Args:
        k: [pages, page_size, num_heads_kv, head_dim_qk] for layout "nhd", [pages, num_heads_kv, page_size, head_dim_qk] for
            "hnd", [pages, num_heads_kv, head_dim_qk / x, page_size, x] for "xpacked" (vLLM); for the MLA formats uint8
            [pages, page_size, 656], or [pages, bytes of a page] for "mla_584". float32, float16, bfloat16, float8_e4m3fn,
            float8_e5m2 or int8.
        v: as k, with head_dim_v ("xpacked": [pages, num_heads_kv, head_dim_v, page_size]). None: V is the first `head_dim_v`
            columns of K (MLA).
        k_scale, v_scale: float32, of 8-bit caches: [1], [num_heads_kv], or for each token and head
            [pages, page_size, num_heads_kv] ("hnd": [pages, num_heads_kv, page_size]). value = code * scale.
        page_table: int32 [batch, max_pages]: the page of token t is entry t // page_size. Entries past the end are not read.
        v_page_table: int32 [batch, max_pages], where V has pages of its own.
        batch_index: int32 [batch], the row of each sequence in a contiguous cache.
        format: "plain", "mla_656" (DeepSeek V3.2) or "mla_584".
        layout: "nhd", "hnd", "xpacked" or "bytes" (the MLA formats). None: "bytes" for those, else "nhd".
        page_size: tokens a page; None: from the shape ("mla_584" needs it).
        ring_capacity: token t lives in slot t mod ring_capacity.
    """

    __slots__ = ("k", "v", "k_scale", "v_scale", "page_table", "v_page_table", "batch_index", "format", "layout", "page_size",
                 "ring_capacity")

    @suggesting
    def __init__(self, k: Array, v: Array | None = None, *, k_scale: Array | None = None, v_scale: Array | None = None,
                 page_table: Array | None = None, v_page_table: Array | None = None, batch_index: Array | None = None,
                 format: Format | None = None, layout: Layout | None = None, page_size: int | None = None,
                 ring_capacity: int | None = None) -> None:
        self.k: Any = k  # what was given, of any framework
        self.v: Any = v
        self.k_scale: Any = k_scale
        self.v_scale: Any = v_scale
        self.page_table: Any = page_table
        self.v_page_table: Any = v_page_table
        self.batch_index: Any = batch_index
        self.format = format
        self.layout: Layout | None = "bytes" if layout is None and format in ("mla_656", "mla_584") else layout
        self.page_size = page_size
        self.ring_capacity = ring_capacity


class Prologue(_Record):
    """Applied to q, k and v of the new tokens, in fp32 and in this order: dequantise, bias, IA3, RoPE, log-n, append.

    Args:
        qkv_scale: float32 [3]: scales of q, k and v where they are int8 (needed) or float8.
        q_bias: [num_heads_q, head_dim_qk]. k_bias: [num_heads_kv, head_dim_qk]. v_bias: [num_heads_kv, head_dim_v].
        ia3_k, ia3_v: [num_tasks, num_heads_kv, head_dim]; ia3_task: int32 [batch], None: task 0.
        rope_cos_sin: float32 [positions, R] or [num_tables, positions, R]: R/2 cosines, then R/2 sines of each position;
            `rope_table` makes it.
        rope_table_index: int32 [batch]: the table of each sequence.
        positions: int32 [total_q] or [total_q, 3] (mRoPE): rope position of each new token; None: its place in the sequence
            (needed where indices name slots).
        rope_offset: first rotated channel.
        rope_interleaved: True: pairs (2j, 2j+1), GPT-J; False: (j, j+R/2), NeoX.
        mrope_section: pairs of each of the three components of a position. mrope_interleaved: as docs/semantics.md says.
        append: write k and v of the new tokens to the cache, at positions seqused_kv...
        logn: float32 [positions]: q at position p is multiplied by logn[p].
        power_of_two_scales: scales that append writes: those of "mla_656", and scales per token and head.
    """

    __slots__ = ("qkv_scale", "q_bias", "k_bias", "v_bias", "ia3_k", "ia3_v", "ia3_task", "rope_cos_sin", "rope_table_index",
                 "positions", "rope_offset", "rope_interleaved", "mrope_section", "mrope_interleaved", "append", "logn",
                 "power_of_two_scales")

    @suggesting
    def __init__(self, *, qkv_scale: Array | None = None, q_bias: Array | None = None, k_bias: Array | None = None,
                 v_bias: Array | None = None, ia3_k: Array | None = None, ia3_v: Array | None = None,
                 ia3_task: Array | None = None, rope_cos_sin: Array | None = None, rope_table_index: Array | None = None,
                 positions: Array | None = None, rope_offset: int | None = None, rope_interleaved: bool | None = None,
                 mrope_section: tuple[int, int, int] | None = None, mrope_interleaved: bool | None = None,
                 append: bool | None = None, logn: Array | None = None, power_of_two_scales: bool | None = None) -> None:
        self.qkv_scale: Any = qkv_scale
        self.q_bias: Any = q_bias
        self.k_bias: Any = k_bias
        self.v_bias: Any = v_bias
        self.ia3_k: Any = ia3_k
        self.ia3_v: Any = ia3_v
        self.ia3_task: Any = ia3_task
        self.rope_cos_sin: Any = rope_cos_sin
        self.rope_table_index: Any = rope_table_index
        self.positions: Any = positions
        self.rope_offset = rope_offset
        self.rope_interleaved = rope_interleaved
        self.mrope_section = mrope_section
        self.mrope_interleaved = mrope_interleaved
        self.append = append
        self.logn: Any = logn
        self.power_of_two_scales = power_of_two_scales


class View(_Record):
    """An array whose bytes are of a dtype that its framework lacks: `View(numpy_uint16, "bfloat16")`. Elements keep their size."""

    __slots__ = ("array", "dtype")

    @suggesting
    def __init__(self, array: Array, dtype: DtypeName) -> None:
        self.array: Any = array
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)


class Spec(_Record):
    """A dense array without data, for `supported`, `warm` and `Plan`: shape, dtype and device ("cpu", "cuda", "cuda:1")."""

    __slots__ = ("shape", "dtype", "cuda", "index")

    @suggesting
    def __init__(self, shape: tuple[int, ...], dtype: DtypeName, device: str = "cpu") -> None:
        try:
            self.shape = tuple(map(operator.index, shape))
        except TypeError:
            raise WrongType(f"shape is {shape!r}; ints are expected") from None
        self.dtype = dtype
        self.cuda, self.index = parse_device(device)


def parse_device(device: str) -> tuple[bool, int]:
    """("cuda:1") -> (True, 1)."""
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not (index.isascii() and index.isdigit() and int(index) < 2**31)):
        raise InvalidArgument(f"device is {device!r}; 'cpu', 'cuda' and 'cuda:N' are known")
    return kind == "cuda", int(index or 0)
