# SPDX-License-Identifier: Apache-2.0
"""Exceptions. Each is an `Error`, and also the built-in exception that Python programmers expect."""

from __future__ import annotations

import functools
import operator
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    Function = TypeVar("Function", bound=Callable[..., Any])


class Error(Exception):
    """A failed call: the message is the library's; `status` is the name of the C status ("device error", "bad data", ...)."""

    status: str = ""


class InvalidArgument(Error, ValueError):
    """An array or a value does not fit: the message names the argument, its value and what is allowed."""


class WrongType(Error, TypeError):
    """An argument of a type, or an array of a dtype, that nothing here takes."""


class Unsupported(Error, NotImplementedError):
    """Well formed, but no kernel on the device covers it: the message names the nearest one and what differs."""


class OutOfMemory(Error, MemoryError):
    """An allocation of the library failed."""


# What callers of other libraries say, and what it is here; each begins with an argument.
_ELSEWHERE = {
    "attn_mask": "mask_bits, or attune.sdpa, which has attn_mask", "attention_mask": "mask_bits, or attune.sdpa, which has attn_mask",
    "attn_bias": "bias", "is_causal": "causal", "scale": "softmax_scale", "sm_scale": "softmax_scale", "scaling": "softmax_scale",
    "window_size": "window_left and window_right", "sliding_window": "window_left (keys beside the query's own)",
    "logits_soft_cap": "softcap", "s_aux": "sinks", "block_table": "cache.page_table", "page_table": "cache.page_table",
    "k_descale": "cache.k_scale", "v_descale": "cache.v_scale", "cu_seqlens": "cu_seqlens_q", "cu_seqlens_k": "cu_seqlens_kv",
    "max_seqlen_k": "max_seqlen_kv", "seqused_k": "seqused_kv", "cache_seqlens": "seqused_kv",
    "enable_gqa": "k (and v) with fewer heads, which needs no argument", "query": "q", "key": "k", "value": "v",
    "slot_mapping": "slots",
}


def unknown_argument(name: object, known: Iterable[str]) -> str:
    """The sentence about a name that is no argument."""
    import difflib  # here alone: importing attune is quick

    known = list(known)
    meant = _ELSEWHERE.get(str(name), "")
    if meant.startswith("mask_bits, or ") and "mask_bits" not in known:
        meant = meant[len("mask_bits, or ") :]
    elif re.split(r"\W", meant)[0] not in known:
        same = [other for other in known if other == meant.rpartition(".")[2] or (meant or name) in (_ELSEWHERE.get(other), other)
                or _ELSEWHERE.get(other) == name]
        meant = (same or difflib.get_close_matches(str(name), known, 1, 0.75) or [""])[0]
    return f"'{name}' is not an argument of this operation" + (f"; did you mean {meant}?" if meant else "")


def refuse_unknown(function: str, named: Iterable[str], known: Iterable[str]) -> None:
    """Raises WrongType for the first name that is no argument of the function."""
    known = list(known)
    for name in named:
        if name not in known:
            raise WrongType(f"{function}: {unknown_argument(name, known)}") from None


def suggesting(function: Function) -> Function:
    """The function, or __init__ of a class, whose error about an unknown keyword says which one was meant."""
    code: Any = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except TypeError:
            refuse_unknown(function.__qualname__.partition(".")[0], named, known)
            raise

    return call  # type: ignore[return-value]


def whole(argument: str, value: object, least: int = 0, most: int = 2**63 - 1) -> int:
    """An argument that is a number of things, or the exception that names it."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise WrongType(f"{argument} is {value!r}; an int is expected") from None
    if not least <= number <= most:
        raise InvalidArgument(f"{argument} is {number}; {least}..{most} is allowed")
    return number


def flag(argument: str, value: object) -> bool:
    """A bool, one of numpy or torch, 0 or 1; None is False. Other things have a truth value that their caller may not mean."""
    if value is True or value is False:
        return value is True
    if value is None:
        return False
    try:
        is_bool = str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
        number = int(bool(value)) if is_bool else operator.index(value)  # type: ignore[arg-type]
    except Exception:
        number = -1
    if number not in (0, 1):
        raise WrongType(f"{argument} is {value!r}; a bool is expected")
    return number == 1


def no_array(argument: str, value: object) -> WrongType:
    return WrongType(f"{argument} is {type(value)!r}; an array is expected: torch, numpy, CuPy, JAX, or anything else with __dlpack__")


def shape_of(argument: str, array: object) -> tuple[int, ...]:
    """The shape of an array, or the exception that names the argument that is none."""
    try:
        return (*array.shape,)  # type: ignore[attr-defined]
    except Exception:
        raise no_array(argument, array) from None
