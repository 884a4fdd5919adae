# SPDX-License-Identifier: Apache-2.0
"""Attention of one RadixAttention of SGLang: what Attune is told of it, and its cache as views of SGLang's own."""

from __future__ import annotations

from typing import Any

import torch

import attune

from . import coverage


class Layer:
    """Dense attention over a pool with K and V of [slots, heads, channels], or [pages, heads, page_size, channels]."""

    def __init__(self, layer: Any, pool: Any, page_size: int, dtype: torch.dtype, in_window_pool: bool) -> None:
        coverage.check_layer(layer)
        self._layer, self._pool, self._page_size = layer, pool, page_size
        self.in_window_pool = in_window_pool
        self.num_heads: int = layer.tp_q_head_num
        self.num_kv_heads: int = layer.tp_k_head_num
        self.head_size: int = layer.qk_head_dim
        self.head_size_v: int = layer.v_head_dim
        self.rope_apart = 0  # SGLang's models join them for backends that it does not name itself
        self.width = self.num_heads * self.head_size_v
        self.dtype = dtype
        self.fields: dict[str, Any] = {"causal": True, "softmax_scale": float(layer.scaling)}
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            self.fields["window_left"] = int(layer.sliding_window_size)  # keys beside the query's own
        if layer.logit_cap and layer.logit_cap > 0:
            self.fields["softcap"] = float(layer.logit_cap)
        self.arrays: dict[str, torch.Tensor | None] = {}
        self.out_dtype, self.returns_lse = dtype, False
        self.kind = self._kind()
        self._cache: attune.KVCache | None = None
        self._of: tuple[int, Any] = 0, None

    def _kind(self) -> str:
        sinks = self.arrays.get("sinks")
        scaled = self._layer.k_scale is not None
        return repr((type(self).__name__, self.num_heads, self.num_kv_heads, self.head_size, self.head_size_v, self.dtype, scaled,
                     None if sinks is None else sinks.dtype, self.fields))

    def take_sinks(self, sinks: torch.Tensor) -> None:
        """sinks [num_heads], that come with the first call."""
        self.arrays["sinks"] = sinks.detach()
        self.kind = self._kind()
        coverage.check_kernels(self, self.cache(), sinks.device)

    def cache(self) -> attune.KVCache:
        """The layer's cache without its page_table. Views are made once for a pool's memory and the layer's scales."""
        k, v = self._pool.get_kv_buffer(self._layer.layer_id)
        address, scale = self._of
        if self._cache is None or k.data_ptr() != address or self._layer.k_scale is not scale:
            self._cache, self._of = self._views(k, v), (k.data_ptr(), self._layer.k_scale)
        return self._cache

    def _views(self, k: torch.Tensor, v: torch.Tensor) -> attune.KVCache:
        scales = {}
        if k.dtype.itemsize == 1 and self._layer.k_scale is not None:
            scales = {"k_scale": _scale(self._layer.k_scale), "v_scale": _scale(self._layer.v_scale)}
        if k.dim() == 4:
            return attune.KVCache(k, v, layout="hnd", **scales)
        return attune.KVCache(pages(k, self._page_size), pages(v, self._page_size), **scales)


class LatentLayer(Layer):
    """Absorbed attention over a pool of latent and rope channels, [slots, 1, channels]: V is part of K."""

    def __init__(self, layer: Any, pool: Any, page_size: int, dtype: torch.dtype) -> None:
        super().__init__(layer, pool, page_size, dtype, False)
        coverage.check_latent_scale(layer, pool)
        self.fields["head_dim_v"] = self.head_size_v
        self.kind = self._kind()

    def _views(self, k: torch.Tensor, v: torch.Tensor) -> attune.KVCache:
        return attune.KVCache(pages(k, self._page_size))


def pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """[slots, heads, channels] -> [pages, page_size, heads, channels], without the slots behind the last page."""
    return slots[: slots.shape[0] // page_size * page_size].unflatten(0, (-1, page_size))


def _scale(scale: torch.Tensor) -> torch.Tensor:
    return scale.detach().reshape(-1)
