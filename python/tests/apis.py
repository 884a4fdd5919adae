# SPDX-License-Identifier: Apache-2.0
"""attune as tests of numpy arrays call it: on those arrays, and on copies of them in the memory of the first GPU, as tensors of
torch of the same strides."""

import numpy as np
import pytest

import attune
from cases import DTYPES
from compare import dtype_name

try:
    import torch

    GPU = torch.cuda.is_available()
except ImportError:
    GPU = False


class OnHost:
    """The module itself. dtype: of the arrays of a test, where it leaves a choice."""

    device = "host"

    def __init__(self, dtype="float32"):
        self.dtype = dtype

    def __getattr__(self, name):
        return getattr(attune, name)


class OnGpu:
    """Calls with arrays of numpy run on the GPU; what they write is in the arrays afterwards, and results are arrays of numpy.
    A test whose call no kernel there covers is skipped."""

    device = "cuda"

    def __init__(self, dtype="float32"):
        self.dtype = dtype

    def __getattr__(self, name):
        function = getattr(attune, name)

        def call(*args, **kwargs):
            moved = {}  # id of an array -> (the array, its tensor)
            args, kwargs = put(args, moved), put(kwargs, moved)
            try:
                result = function(*args, **kwargs)
            except attune.Unsupported as reason:
                pytest.skip(str(reason))
            torch.cuda.synchronize()
            for array, tensor in moved.values():
                if array.flags.writeable:
                    array[...] = to_numpy(tensor)
            return take(result, moved)

        return call


APIS = [OnHost()] + [OnGpu()] * GPU
APIS_AND_DTYPES = [OnHost()] + [OnGpu("float32"), OnGpu("bfloat16")] * GPU


def to_cuda(array):
    """A tensor of the array's values and strides; memory around them, which must not be read, comes along."""
    dtype = getattr(torch, dtype_name(array))
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype, device="cuda")
    owner = array.base if isinstance(array.base, np.ndarray) else array
    if not (owner.flags.c_contiguous or owner.flags.f_contiguous):
        owner = array = np.ascontiguousarray(array)
    data = torch.from_numpy(owner.reshape(-1, order="A").view(np.uint8).copy()).cuda().view(dtype)
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return data.as_strided(array.shape, [stride // array.itemsize for stride in array.strides], offset // array.itemsize)


def to_numpy(tensor):
    name = str(tensor.dtype).partition(".")[2]
    bits = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8}.get(name)
    tensor = tensor.cpu().contiguous()
    return tensor.numpy() if bits is None else tensor.view(bits).numpy().view(DTYPES[name])


def put(value, moved):
    """The same with tensors instead of arrays."""
    if isinstance(value, np.ndarray):
        if id(value) not in moved:
            moved[id(value)] = value, to_cuda(value)
        return moved[id(value)][1]
    if isinstance(value, dict):
        return {name: put(inner, moved) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(put(inner, moved) for inner in value)
    if isinstance(value, (attune.KVCache, attune.Prologue)):
        made = attune.KVCache(None) if isinstance(value, attune.KVCache) else attune.Prologue()
        for name in value.__slots__:
            setattr(made, name, put(getattr(value, name), moved))
        return made
    return value


def take(result, moved):
    if isinstance(result, tuple):
        return tuple(take(inner, moved) for inner in result)
    if not GPU or not isinstance(result, torch.Tensor):
        return result
    for array, tensor in moved.values():
        if tensor is result:
            return array
    assert result.is_cuda
    return to_numpy(result)
