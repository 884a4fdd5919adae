# SPDX-License-Identifier: Apache-2.0
"""Exceptions. Each is an `Error`, and also the built-in exception that Python programmers expect."""


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
