# SPDX-License-Identifier: Apache-2.0
"""Scales of outputs of 8 bits. vLLM has output = o / scale, Attune out = o * out_scale."""

from __future__ import annotations

from typing import Any

import torch

Known = dict[Any, tuple[torch.Tensor, torch.Tensor]]  # layer -> its scale, and the reciprocal of that


class OutputScales:
    """Of a step. Its first layer makes the reciprocals of all that are known, which are two launches; a captured graph has them in it, so
    that it reads what the scales are when it is replayed."""

    def __init__(self, known: Known) -> None:
        self._known, self._made = known, set[Any]()
        self._first: Any = None

    def reciprocal(self, layer: Any, scale: torch.Tensor) -> torch.Tensor:
        """scale: one number -> float32 [1]."""
        found = self._known.get(layer)
        new = found is None or found[0].data_ptr() != scale.data_ptr()
        if new:  # the reciprocal stays where graphs know it
            self._known[layer] = scale.detach().view(1), scale.new_empty(1) if found is None else found[1]
        if self._first is None or self._first is layer:
            self._first, self._made = layer, set(self._known)
            _invert(list(self._known.values()))
        elif new or layer not in self._made:
            self._made.add(layer)
            _invert([self._known[layer]])
        return self._known[layer][1]


def _invert(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    reciprocals = [reciprocal for _, reciprocal in pairs]
    torch._foreach_copy_(reciprocals, [scale for scale, _ in pairs])
    torch._foreach_reciprocal_(reciprocals)
