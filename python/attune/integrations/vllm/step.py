# SPDX-License-Identifier: Apache-2.0
"""The layers of vLLM's model, by kind: a plan serves all of a kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase


class Kinds:
    """A layer of each kind among those of a metadata builder."""

    def __init__(self, vllm_config: Any, layer_names: list[str], of: type[Any]) -> None:
        self._vllm_config, self._layer_names, self._of = vllm_config, layer_names, of
        self._found: list[tuple[Any, Any]] | None = None

    def make_plans(self, num_tokens: int, step: Any) -> None:
        """So that none has to be made while a graph is captured. Does nothing before vLLM has bound the caches."""
        if num_tokens == 0:
            return
        if self._found is None:
            layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase, self._layer_names).values()
            if any(layer.kv_cache.numel() == 0 for layer in layers):
                return
            kinds: dict[tuple[str, ...], tuple[Any, Any]] = {}
            for layer, impl in self._impls(layers):
                impl.cache(layer, layer.kv_cache)  # completes its kind
                kinds.setdefault(tuple(form.kind for form in impl.forms), (layer, impl))
            self._found = list(kinds.values())
        for layer, impl in self._found:
            impl.make_plans(step, impl.cache(layer, layer.kv_cache))

    def _impls(self, layers: Any) -> Iterator[tuple[Any, Any]]:
        for layer in layers:
            for impl in layer.impl.get_impl_variants():
                if isinstance(impl, self._of):
                    yield layer, impl
