# SPDX-License-Identifier: Apache-2.0
"""Allocation and streams of the frameworks. None of them is imported here before one of its arrays was seen."""

from __future__ import annotations

import sys
from typing import Any

from ._errors import InvalidArgument, OutOfMemory, Unsupported, WrongType, no_array
from ._records import Spec, View

_NUMPY_VIEWS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool", "int32", "int64")
_OF_TOKENS = _DTYPES[:6]  # of q, k and v
_names: dict[Any, str] = {}  # of the dtypes seen so far


def dtype_name(argument: str, dtype: Any) -> str:
    """torch.float32, numpy.dtype("float32"), numpy.float32 or "float32" -> "float32"."""
    try:
        return _names[dtype]
    except (KeyError, TypeError):
        name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype).rpartition(".")[2]
    if name not in _DTYPES:
        raise WrongType(f"{argument} is {dtype!r}; known are {', '.join(_DTYPES)}")
    _names[dtype] = name
    return name


def array_dtype(argument: str, array: Any) -> str:
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        raise no_array(argument, array)
    try:
        return dtype_name(argument, dtype)
    except WrongType:
        takes = _OF_TOKENS if argument in ("q", "k", "v") else _DTYPES[:3]
        raise WrongType(f"{argument} has dtype {dtype}; allowed: {', '.join(takes)}") from None


def numpy_empty(shape: tuple[int, ...], dtype: Any) -> Any:
    import numpy

    try:
        return numpy.empty(shape, dtype)
    except MemoryError:
        raise OutOfMemory(f"there is no memory for an array of shape {list(shape)} and dtype {dtype}") from None
    except ValueError as error:  # more bytes than an address has
        raise InvalidArgument(f"an array of shape {list(shape)} and dtype {dtype} cannot be made: {error}") from None


class _Numpy:
    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        view = _NUMPY_VIEWS.get(dtype)
        if view is None:
            return numpy_empty(shape, dtype)
        try:
            import ml_dtypes
        except ImportError:
            return View(numpy_empty(shape, view), dtype)
        return numpy_empty(shape, getattr(ml_dtypes, dtype))

    @staticmethod
    def from_numpy(array: Any, like: Any) -> Any:
        return array

    @staticmethod
    def current_stream(array: Any, index: int) -> int:
        raise WrongType(f"{type(array).__name__} is on a CUDA device and its framework is not known: pass stream=")


_torch_devices: dict[int, Any] = {}


class _Torch:
    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))

    @staticmethod
    def allocate(index: int, size: int, stream: int | None) -> Any:
        torch = sys.modules["torch"]
        device = _torch_devices.get(index) or _torch_devices.setdefault(index, torch.device("cuda", index))
        if stream is None:
            return torch.empty(size, dtype=torch.uint8, device=device)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            return torch.empty(size, dtype=torch.uint8, device=device)

    @staticmethod
    def from_numpy(array: Any, like: Any) -> Any:
        return sys.modules["torch"].from_numpy(array).to(like.device)

    @staticmethod
    def current_stream(array: Any, index: int) -> int:
        return sys.modules["torch"].cuda.current_stream(index).cuda_stream


class _Cupy:
    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        cupy = sys.modules["cupy"]
        with like.device:
            view = _NUMPY_VIEWS.get(dtype)
            return cupy.empty(shape, dtype) if view is None else View(cupy.empty(shape, view), dtype)

    @staticmethod
    def allocate(index: int, size: int, stream: int | None) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(index):
            if stream is None:
                return cupy.empty(size, "uint8")
            with cupy.cuda.ExternalStream(stream, index):
                return cupy.empty(size, "uint8")

    @staticmethod
    def from_numpy(array: Any, like: Any) -> Any:
        with like.device:
            return sys.modules["cupy"].asarray(array)

    @staticmethod
    def current_stream(array: Any, index: int) -> int:
        return sys.modules["cupy"].cuda.get_current_stream().ptr


class _Jax:
    """JAX arrays do not change, so results are written to memory of numpy and handed over without a copy where it can be."""

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        if isinstance(like, sys.modules["jax"].core.Tracer):
            raise WrongType("an array has no data, as JAX traces it (jit, grad, vmap); attention for traced programs is "
                            "attune.integrations.jax.attention")
        if not like.is_deleted() and any(device.platform != "cpu" for device in like.devices()):
            _Jax.current_stream(like, 0)
        return _Numpy.empty(shape, dtype, like)

    @staticmethod
    def from_numpy(array: Any, like: Any) -> Any:
        return sys.modules["jax"].numpy.asarray(array)

    @staticmethod
    def current_stream(array: Any, index: int) -> int:
        raise Unsupported("q is a JAX array on CUDA, and JAX has no stream to share: pass arrays through torch.from_dlpack, or "
                          "use the CPU")


_known: dict[type, Any] = {}


def framework_of(array: Any) -> Any:
    """The functions of the framework that an array belongs to; numpy's for everything unknown."""
    kind = type(array)
    found = _known.get(kind)
    if found is None:
        if kind is View:  # of any framework's
            return framework_of(array.array)
        found = _known[kind] = _find(kind, array)
    return found


def _find(kind: type, array: Any) -> Any:
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root == "torch":
            from .integrations import torch  # noqa: F401  registers the operators

            return _Torch
        if root == "cupy":
            return _Cupy
        if root in ("jax", "jaxlib"):
            return _Jax
    return _Numpy


def is_torch(array: Any) -> bool:
    return framework_of(array) is _Torch


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """An uninitialised array of the framework and on the device of another."""
    return framework_of(like).empty(shape, dtype, like.array if type(like) is View else like)


def finish(made: Any, like: Any) -> Any:
    """What the caller gets for arrays (one, or a tuple) that `empty` made: JAX's are arrays of numpy until here."""
    if framework_of(like) is not _Jax or isinstance(made, View):
        return made
    return tuple(finish(array, like) for array in made) if type(made) is tuple else _Jax.from_numpy(made, like)


# What the extension module calls.


def current_stream(array: Any, index: int) -> int:
    return framework_of(array).current_stream(array, index)


def allocate(array: Any, index: int, size: int, stream: int | None) -> Any:
    """Bytes on a CUDA device, for work on a stream (None: the current one): the framework gives them to nobody else before that."""
    array = array.array if type(array) is View else array
    framework = framework_of(array)
    if type(array) is Spec:  # of no framework: one that is in use
        framework = _Torch if "torch" in sys.modules else _Cupy if "cupy" in sys.modules else _Numpy
    if framework in (_Numpy, _Jax):
        raise WrongType(f"no way is known to allocate memory on the device of a {type(array).__name__}: pass workspace="
                        + (", or import torch or cupy before" if type(array) is Spec else ""))
    return framework.allocate(index, max(size, 1), stream)
