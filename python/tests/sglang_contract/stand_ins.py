# SPDX-License-Identifier: Apache-2.0
"""Import it before SGLang. SGLang imports triton and torchvision, which nothing here calls: triton is 0.3 GB, torchvision wants CUDA's
libraries. Where they are missing SGLang's own stand-ins for triton take their place, which it makes for machines of Apple."""

import importlib.util
import pathlib
import platform
import sys
from unittest import mock

import torch
from transformers.utils import is_torchvision_available


def make_mock(name):
    """A module of which everything can be imported."""
    sys.modules["sglang_platform_stubs"]._make_mock(name)


def install():
    sglang = pathlib.Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", sglang / "_platform_stubs.py")
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs  # where its dataclasses look for it
    spec.loader.exec_module(stubs)
    stubs._patch_non_blocking = lambda: None  # of copies to Apple's GPUs
    apple = (mock.patch.object(sys, "platform", "darwin"), mock.patch.object(platform, "machine", lambda: "arm64"),
             mock.patch.object(torch.backends.mps, "is_available", lambda: True))
    with apple[0], apple[1], apple[2]:
        stubs.install_platform_stubs()
    if not is_torchvision_available():  # which remembers it
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            make_mock(name)


install()
