# SPDX-License-Identifier: Apache-2.0
"""Finds the modules of peers and what they make of a case; side_by_side.py has what such a module defines."""

import importlib


def load_peers(names, device):
    """Modules of peers. Those that are not asked for may be missing."""
    if names:
        return [importlib.import_module(name) for name in names]
    found = []
    for name in ["peer_torch"] + ([] if device == "cuda" else ["peer_onnxruntime", "peer_openvino"]):
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            print(f"{name}: left out, {error}")
    return found


def pairs_of(prepared, module):
    """What prepare() gave as {name: (without the schedule, with it)}."""
    if prepared is None:
        return {}
    if not isinstance(prepared, dict):
        prepared = {getattr(module, "NAME", module.__name__): prepared}
    return {name: call if isinstance(call, tuple) else (call, call) for name, call in prepared.items() if call is not None}
