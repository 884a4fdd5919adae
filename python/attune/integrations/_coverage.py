# SPDX-License-Identifier: Apache-2.0
"""Asks Attune's kernel registry about calls that an engine is going to make."""

from __future__ import annotations

from typing import Any

import attune

Capability = tuple[int, int]


def why_not(capability: Capability | None, call: dict[str, Any]) -> str | None:
    """Why no kernel takes a call (arguments of attune.supported) on a GPU of that compute capability, or None. The GPU is not opened.
    capability None: on the CPU."""
    where: dict[str, Any] = {"device": "cpu"} if capability is None else {"capability": capability}
    try:
        return attune.supported(**call, **where).reason or None
    except attune.Error as error:
        return str(error)


def named(capability: Capability | None) -> str:
    return "the CPU" if capability is None else "a GPU of compute capability {}.{}".format(*capability)
