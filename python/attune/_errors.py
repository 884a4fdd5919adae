# SPDX-License-Identifier: Apache-2.0
"""Exceptions. Each is an `Error`, and also the built-in exception that Python programmers expect."""

import operator


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


def whole(argument: str, value: object, least: int = 0, most: int = 2**63 - 1) -> int:
    """An argument that is a number of things, or the exception that names it."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise WrongType(f"{argument} is {value!r}; an int is expected") from None
    if not least <= number <= most:
        raise InvalidArgument(f"{argument} is {number}; {least}..{most} is allowed")
    return number


def no_array(argument: str, value: object) -> WrongType:
    return WrongType(f"{argument} is {type(value)!r}; an array is expected: torch, numpy, CuPy, JAX, or anything else with __dlpack__")


def shape_of(argument: str, array: object) -> tuple[int, ...]:
    """The shape of an array, or the exception that names the argument that is none."""
    try:
        return (*array.shape,)  # type: ignore[attr-defined]
    except Exception:
        raise no_array(argument, array) from None
