# SPDX-License-Identifier: Apache-2.0
"""Import it before SGLang, on a GPU without SGLang's compiled kernels (sgl_kernel: 0.6 GB) and without its compiler of others: layers
compute by SGLang's own functions of torch (`forward_native`). What has none of these ends with the name of the function that is missing."""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types

MISSING = "sgl_kernel"


class Missing(types.ModuleType):
    """Everything can be imported of it; what is called raises."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = Missing(f"{self.__name__}.{name}")
        if name[0].isupper():  # of which others are derived
            made = type(name, (), {"__init__": made.__call__})
        setattr(self, name, made)
        return made

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__} is not there, and was called")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == MISSING else None

    def create_module(self, spec):
        return Missing(spec.name)

    def exec_module(self, module):
        pass


def install():
    sys.meta_path.insert(0, Finder())
    os.environ.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")
    for name in ("SGLANG_CRASH_ON_JIT_COMPILE", "TORCHDYNAMO_DISABLE"):
        os.environ.setdefault(name, "1")
    importlib.import_module(MISSING).weak_ref_tensor = lambda tensor: tensor  # of graphs, which then keep more memory


def patch():
    """Behind SGLang's imports."""
    from sglang.srt.layers.dual_gemm import DualGemm

    DualGemm._select_mode = lambda *_: None  # asks cutlass, for Blackwell


install()
