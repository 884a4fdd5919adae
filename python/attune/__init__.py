# SPDX-License-Identifier: Apache-2.0
"""Attention for LLM inference, on the CPU and on NVIDIA GPUs from Ampere on, over arrays of torch, numpy, CuPy, JAX and all with DLPack.

    out = attune.attention(q, k, v, causal=True)

`attention` is the one operation; `Plan` runs it again and again without allocation. `help(attune.attention)` says it all.

Every function raises InvalidArgument (a ValueError), WrongType (a TypeError) or Unsupported (a NotImplementedError) with a message that
names the argument; all are `Error`s, but for what a framework raises that has no memory. On CUDA functions enqueue work on the current stream, or on `stream`, and do not wait.
"""

import sys as _sys

from . import _core, _errors, _frameworks, _records
from ._attention import Plan, Support, attention, supported, validate, warm
from ._errors import Error, InvalidArgument, OutOfMemory, Unsupported, WrongType
from ._info import (Device, Kernel, describe_cuda, devices, get_num_threads, info, kernels, set_log_callback,
                    set_num_threads)
from ._indexer import indexer_scores, indexer_select, indexer_topk
from ._ops import cache_append, cache_dequantize, cache_gather, cache_quantize, merge, qkv_prepare
from ._records import KVCache, Prologue, Spec, View
from ._sdpa import sdpa
from ._tables import alibi_slopes, kv_page_bytes, logn_table, rope_frequencies, rope_table, t5_bucket

__version__ = _core.__version__

__all__ = [
    "Device", "Error", "InvalidArgument", "KVCache", "Kernel", "OutOfMemory", "Plan", "Prologue", "Spec", "Support",
    "Unsupported", "View", "WrongType", "alibi_slopes", "attention", "cache_append", "cache_dequantize", "cache_gather",
    "cache_quantize", "describe_cuda", "devices", "get_num_threads", "indexer_scores", "indexer_select", "indexer_topk", "info", "kernels", "kv_page_bytes", "logn_table", "merge",
    "qkv_prepare", "rope_frequencies", "rope_table", "sdpa", "set_log_callback", "set_num_threads", "supported", "t5_bucket",
    "validate", "warm",
]

_core.configure(
    View=View, Spec=Spec, KVCache=KVCache, Prologue=Prologue, Error=Error, InvalidArgument=InvalidArgument,
    WrongType=WrongType, Unsupported=Unsupported, OutOfMemory=OutOfMemory, unknown_argument=_errors.unknown_argument,
    current_stream=_frameworks.current_stream, allocate=_frameworks.allocate)

if "torch" in _sys.modules:  # the operators, so that torch.compile knows them at the first call
    from .integrations import torch as _torch  # noqa: F401
