# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: absorbed layers over the latent cache, and prompts without a prefix over up-projected keys."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from . import coverage
from .backend import AttuneBackend, arrange, refuse_given
from .layers import LatentLayer, Layer


class AttuneMLABackend(AttuneBackend):
    def forward_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, *, q_rope: torch.Tensor | None = None, k_rope: torch.Tensor | None = None,
                       **kwargs: Any) -> torch.Tensor:
        """An absorbed layer: q [tokens, num_heads * (latent + rope)], or both parts; k [tokens, 1, latent + rope], or both parts, go
        to the cache first -> [tokens, num_heads * latent]. Another layer: k, v [tokens, num_heads, ...], which see each other alone."""
        ours = self._find(layer)
        refuse_given(kwargs)
        metadata = self.forward_metadata
        assert metadata is not None
        step = metadata.step
        if q_rope is not None:
            q = torch.cat([q.view(len(q), ours.num_heads, -1), q_rope.view(len(q), ours.num_heads, -1)], dim=-1)
        if k_rope is not None:
            k = torch.cat([k.view(len(k), 1, -1), k_rope.view(len(k), 1, -1)], dim=-1)
        out, q, written = arrange(forward_batch, q, ours, metadata)
        if isinstance(ours, LatentLayer):
            if save_kv_cache and k is not None:
                self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
            step.attend(ours, q, ours.cache(), written)
            return out
        if forward_batch.mha_return_lse or save_kv_cache:
            coverage.refuse("chunked prefix cache" if forward_batch.mha_return_lse else "save_kv_cache", True, "flashinfer")
        step.attend_new(ours, q, k[: len(q)], v[: len(q)], written)
        return out

    forward_decode = forward_extend

    def _make(self, layer: Any) -> Layer:
        latent = self.token_to_kv_pool.kv_lora_rank
        made: Layer
        if (layer.qk_head_dim, layer.v_head_dim) == (self.token_to_kv_pool.kv_cache_dim, latent):
            made = LatentLayer(layer, self.token_to_kv_pool, self.page_size, self.dtype)
            coverage.check_kernels(made, made.cache(), self.device, self.trees)
        else:
            made = Layer(layer, self.token_to_kv_pool, self.page_size, self.dtype, False)
            coverage.check_kernels(made, None, self.device)
        return made
