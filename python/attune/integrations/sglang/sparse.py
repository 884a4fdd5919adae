# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention (DSA: DeepSeek V3.2, GLM 5): each token attends to the tokens that SGLang's indexer has chosen for it.

Metadata and what the indexer asks are those of SGLang's own DSA backend; attention is Attune's, over slots of DSATokenToKVPool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, handle_attention_dsa

import attune

from .._plans import Plans
from . import NAME, coverage
from .backend import refuse_given
from .layers import LatentLayer, pages

class SparseLayer(LatentLayer):
    """Over slots [slots, 1, latent and rope channels], or [slots, 1, 656] bytes: 512 codes in e4m3, a scale for each 128 of them, 64 rope
    channels in bfloat16."""

    def __init__(self, layer: Any, pool: Any, page_size: int, dtype: torch.dtype, topk: int) -> None:
        super().__init__(layer, pool, page_size, dtype)
        del self.fields["causal"]  # lists name no token that is not seen
        self.topk = topk
        self.kind = repr((self._kind(), topk))

    def _views(self, k: torch.Tensor, v: torch.Tensor) -> attune.KVCache:
        if self._pool.dsa_kv_cache_store_fp8:
            return attune.KVCache(pages(k.view(torch.uint8), self._page_size).squeeze(2), format="mla_656")
        return super()._views(k, v)


@dataclass
class SparseStep:
    """What the layers of a batch share: SGLang's metadata of it, and by the kind of a layer and its rows the layer that ran first, with
    the plan of all of them."""

    metadata: Any
    scheduled: dict[tuple[str, int], tuple[SparseLayer, attune.Plan]] = field(default_factory=dict)


class AttuneDSABackend(dsa_backend.DeepseekSparseAttnBackend):
    def __init__(self, model_runner: Any) -> None:
        """Raises NotImplementedError, by the name of the field, for a model or a server that is not covered."""
        coverage.check_runner(model_runner)
        coverage.check_sparse(model_runner)
        super().__init__(model_runner)
        # Of SGLang's own kernels the one whose lists are slots in every batch and which has no metadata of its own.
        self.dsa_prefill_impl = self.dsa_decode_impl = "tilelang"
        self.enable_auto_select_prefill_impl = False
        self.kv_index_translator = model_runner.kv_index_translator
        self.data_type = model_runner.kv_cache_dtype
        self.page_size: int = model_runner.page_size
        self.dtype: torch.dtype = model_runner.dtype
        self._plans = Plans(self.req_to_token.device)
        self._step = SparseStep(None)
        self._layers: dict[Any, SparseLayer] = {}
        for module in model_runner.model.modules():
            if isinstance(module, RadixAttention) and module.v_head_dim == self.kv_lora_rank:
                self._find(module)
        AttentionBackendRegistry.register(NAME, handle_attention_dsa)  # prompts too go through the indexer, and not over all keys

    def set_dsa_prefill_impl(self, forward_batch: Any = None) -> None:
        """No prompt goes over up-projected keys."""
        self.use_mha = False

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, q_rope: torch.Tensor | None = None, k_rope: torch.Tensor | None = None,
                       topk_indices: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """q [tokens, num_heads * (latent + rope)], or both parts; k [tokens, 1, latent + rope], or both parts, go to the cache first;
        topk_indices int32 [tokens, topk], from the indexer: slots, or numbers of a request's tokens, -1 where there are fewer
        -> [tokens, num_heads * latent]."""
        if topk_indices is None:
            coverage.refuse("topk_indices", None, "dsa")
        refuse_given(kwargs)
        ours = self._find(layer)
        if save_kv_cache and k is not None:
            if k_rope is None:
                k, k_rope = k[..., : self.kv_lora_rank], k[..., self.kv_lora_rank :]
            self.token_to_kv_pool.set_mla_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, k_rope)
        if q_rope is not None:
            q = torch.cat([q.view(len(q), ours.num_heads, -1), q_rope.view(len(q), ours.num_heads, -1)], dim=-1)
        slots, lengths = self._slots(topk_indices, len(q), forward_batch)
        out = forward_batch._attn_output
        out = q.new_empty(len(q), ours.width) if out is None or out.dtype != q.dtype else out.view(-1, ours.width)
        self._attend(ours, q, slots, lengths, out)
        return out

    forward_decode = forward_extend

    def _slots(self, chosen: torch.Tensor, rows: int, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where chosen tokens lie: int32 [rows, topk]; and how many of each row's there may be, int32 [rows]."""
        metadata, mode = self.forward_metadata, forward_batch.forward_mode
        if self.use_fused_topk:
            slots = self._get_fused_topk_page_table(chosen)
        elif mode.is_decode_or_idle():
            slots = dsa_backend.transform_index_page_table_decode(page_table=metadata.page_table_1, topk_indices=chosen, page_size=1)
        else:
            slots = dsa_backend.transform_index_page_table_prefill(
                page_table=metadata.page_table_1, topk_indices=chosen, extend_lens_cpu=metadata.dsa_extend_seq_lens_list, page_size=1,
                output_num_tokens=len(chosen), page_table_is_expanded=mode.is_target_verify(), cu_seqlens_q=metadata.cu_seqlens_q)
        lengths = metadata.dsa_cache_seqlens_int32
        if len(lengths) < rows:  # padding has no list
            lengths = torch.nn.functional.pad(lengths, (0, rows - len(lengths)))
        return self._pad_topk_indices(slots.to(torch.int32), rows), lengths[:rows]

    def _attend(self, ours: SparseLayer, q: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        """As Step.attend: the first layer of a kind makes the schedule, the others use it."""
        if self._step.metadata is not self.forward_metadata:
            self._step = SparseStep(self.forward_metadata)
        cache, key = ours.cache(), (ours.kind, len(q))
        found = self._step.scheduled.get(key)
        if found is None:
            found = self._step.scheduled[key] = ours, self._plans.find_sparse(ours, cache, len(q), slots.shape[1])
        first, plan = found
        (plan.run if first is ours else plan.run_scheduled)(q=q, cache=cache, indices=slots, topk_length=lengths, out=out)

    def _find(self, layer: Any) -> SparseLayer:
        found = self._layers.get(layer)
        if found is None:
            if layer.v_head_dim != self.kv_lora_rank:
                coverage.refuse("v_head_dim", layer.v_head_dim, "dsa")
            found = SparseLayer(layer, self.token_to_kv_pool, self.page_size, self.dtype, self.dsa_index_topk)
            coverage.check_sparse_kernels(found, found.cache(), self.req_to_token.device, self.dsa_index_topk)
            self._layers[layer] = found
        return found
