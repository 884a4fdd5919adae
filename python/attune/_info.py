# SPDX-License-Identifier: Apache-2.0
"""What the library finds on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from . import _core
from ._errors import WrongType, whole

if TYPE_CHECKING:
    from typing import Literal

    DeviceType = Literal["cpu", "cuda"]

_DEVICE_TYPES: tuple[DeviceType, ...] = ("cpu", "cuda")
_LEVELS = ("debug", "info", "warning", "error")


class Device(NamedTuple):
    type: DeviceType
    index: int  # type: ignore[assignment]  # the name in attune.h; tuple.index is not missed
    name: str
    isa: str  # instruction set in use
    num_units: int  # threads of the pool, or streaming multiprocessors
    memory_bytes: int


class Kernel(NamedTuple):
    name: str
    operation: str
    device_type: DeviceType
    coverage: str  # "axis: value, value; axis: ..."


def devices() -> list[Device]:
    """Usable devices; the CPU comes first."""
    return [Device(_DEVICE_TYPES[kind], *rest) for kind, *rest in _core.devices()]


def kernels() -> list[Kernel]:
    """Every row of the kernel registry."""
    return [Kernel(name, operation, _DEVICE_TYPES[kind], coverage) for name, operation, kind, coverage in _core.kernels()]


def describe_cuda() -> str:
    """Driver, GPUs and why one is not used, kernel bundle, disk cache, compiler: a line each."""
    return _core.describe_cuda()


def info() -> str:
    """Version, devices, kernels and the CUDA runtime, for people and bug reports."""
    lines = [f"attune {_core.__version__}"]
    for device in devices():
        name = device.type if device.type == "cpu" else f"{device.type}:{device.index}"
        lines.append(f"{name}  {device.name}, {device.isa}, {device.num_units} units, {device.memory_bytes / 2**30:.1f} GiB")
    lines += [f"kernel  {kernel.name} ({kernel.operation}, {kernel.device_type})" for kernel in kernels()]
    return "\n".join([*lines, describe_cuda().rstrip()])


def set_num_threads(count: int) -> None:
    """Threads of the CPU backend, for plans made later; 0 restores the default: OMP_NUM_THREADS, from 1 to 4096, else all cores."""
    _core.set_num_threads(whole("count", count, most=4096))


def get_num_threads() -> int:
    """Threads of the CPU backend."""
    return _core.get_num_threads()


def set_log_callback(callback: Callable[[str, str], object] | None) -> None:
    """callback(level, message) gets the library's log; level is "debug", "info", "warning" or "error". None drops it (default)."""
    if callback is not None and not callable(callback):
        raise WrongType(f"callback is {callback!r}; a function of a level and a message is expected")
    _core.set_log_callback(None if callback is None else lambda level, message: callback(_LEVELS[level], message))
