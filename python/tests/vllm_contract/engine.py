# SPDX-License-Identifier: Apache-2.0
"""The part of vLLM's engine that is around attention, made of vLLM's own classes: layers, cache specs, caches in a layout, groups,
metadata of a step, the forward context. On the CPU; what the layers compute is compared with the float64 reference."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, get_kv_cache_spec, init_attn_backend
from vllm.v1.worker.utils import allocate_kv_cache

try:  # since 0.33
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

import reference
from attune.integrations.vllm.backend import AttuneBackend
from compare import assert_attention, dtype_name

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 16, 40, 8
CPU = torch.device("cpu")
PAD_SLOT = -1


def owner(layer):
    """The layer whose cache it reads."""
    return getattr(layer, "kv_sharing_target_layer_name", None) or layer.layer_name


class Engine:
    """layers: keyword arguments of vLLM's Attention, one dict each; a group of cache for all of them."""

    def __init__(self, layers, *, layout="LBNHC", dtype=torch.float32, kv_cache_dtype="auto", heads=8, heads_kv=2, d=32,
                 backend=AttuneBackend, **parallel):
        self.heads, self.heads_kv, self.d, self.dtype, self.kv_cache_dtype = heads, heads_kv, d, dtype, kv_cache_dtype
        self.config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(
            block_size=BLOCK_SIZE, cache_dtype=kv_cache_dtype))
        self.config.cache_config.kv_cache_layout = layout
        self.config.model_config = SimpleNamespace(dtype=dtype, is_mm_prefix_lm=False, rswa_window=None, max_model_len=2048)
        for name, value in parallel.items():
            setattr(self.config.parallel_config, name, value)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(self.config):
                self.layers = [Attention(heads, d, d**-0.5, heads_kv, cache_config=self.config.cache_config, attn_backend=backend,
                                         prefix=f"model.layers.{i}.attn", **options) for i, options in enumerate(layers)]
        finally:
            torch.set_default_dtype(default)
        self.options = layers
        self.bind()
        self.tables = {}  # request -> its blocks
        self.lengths = {}  # request -> its tokens in the cache
        self.given = {}  # request, layer -> what was put there: [tokens, 2, heads_kv, d]
        self.free = list(np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS)))  # 0 is vLLM's null block

    def bind(self):
        """From the layers' specs to caches that are bound to them, as the engine core and its worker do it."""
        specs = get_kv_cache_spec(self.config)
        assert len(set(specs.values())) == 1
        spec = next(iter(specs.values()))
        memory = spec.page_size_bytes * len(specs) * NUM_BLOCKS
        self.cache_config = get_kv_cache_config_from_groups(self.config, [KVCacheGroupSpec(list(specs), spec)], memory)
        self.groups, self.graphs, sizes = init_attn_backend(self.cache_config, self.config, CPU)
        caches = allocate_kv_cache(self.cache_config, CPU, self.config.cache_config.get_resolved_kv_cache_layout(), sizes)
        next(iter(caches.values())).untyped_storage().fill_(0xFF)  # NaN: blocks that are not written must not be read
        for layer in self.layers:
            layer.bind_kv_cache(caches[owner(layer)])
        self.builder = self.groups[0][0].get_metadata_builder(0)

    def stored_tokens(self, length):
        """How many of a request's first tokens are in this engine's cache."""
        return length

    def slot(self, request, position):
        """Where a token is in this engine's cache; PAD_SLOT where it is not."""
        return int(self.tables[request][position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE

    def more_metadata(self, lengths):
        return {}

    def step(self, queries, *, pad_tokens=0, pad_reqs=0, max_query_len=None, capture=False):
        """Makes metadata for queries: request -> new tokens; in the order of the dict. Padding is as for a full CUDA graph."""
        for request, count in queries.items():
            self.lengths[request] = self.lengths.get(request, 0) + count
            table = self.tables.setdefault(request, [])
            while len(table) * BLOCK_SIZE < self.stored_tokens(self.lengths[request]):
                table.append(self.free.pop())
        counts = list(queries.values()) + [0] * pad_reqs
        tokens, reqs = sum(counts), len(counts)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        lengths = torch.tensor([self.lengths[request] for request in queries] + [0] * pad_reqs, dtype=torch.int32)
        table = torch.full((reqs, MAX_BLOCKS), 2**30, dtype=torch.int32)  # vLLM leaves old ids behind the last block
        slots = torch.full((1, tokens + pad_tokens), PAD_SLOT, dtype=torch.int64)
        at = 0
        for row, (request, count) in enumerate(queries.items()):
            blocks = self.tables[request]
            table[row, : len(blocks)] = torch.tensor([int(block) for block in blocks])
            for position in range(self.lengths[request] - count, self.lengths[request]):
                slots[0, at] = self.slot(request, position)
                at += 1
        self.slots = {layer.layer_name: slots[0] for layer in self.layers}
        self.metadata = build_attn_metadata(
            self.groups, reqs, tokens + pad_tokens, starts, starts.clone(), max(counts) if max_query_len is None else max_query_len,
            lengths, 2048 if capture else int(lengths.max()), [table], slots, self.cache_config,
            seq_lens_cpu_upper_bound=lengths.clone(), for_cudagraph_capture=capture, **self.more_metadata(lengths))
        self.queries = queries
        return self.metadata[self.layers[0].layer_name]

    def forward(self, layer, q, k, v, metadata="this step's"):
        with set_forward_context(self.metadata if metadata else None, self.config, slot_mapping=self.slots if metadata else {}):
            return layer(q.flatten(1), None if k is None else k.flatten(1), None if v is None else v.flatten(1)).view(
                -1, self.heads, self.d)

    def run(self, queries, *, pad_rows=0, **padding):
        """A step through every layer; each output is compared. pad_rows: of q, k and v, but not of the metadata, as in a piecewise
        graph."""
        self.step(queries, **padding)
        tokens = sum(queries.values())
        for layer in self.layers:
            rows = tokens + padding.get("pad_tokens", 0) + pad_rows
            widths = [heads * self.d for heads in (self.heads, self.heads_kv, self.heads_kv)]
            fused = torch.randn(rows, sum(widths)).to(self.dtype).split(widths, dim=-1)  # views of one projection, as models have them
            q, k, v = (x.unflatten(-1, (-1, self.d)) for x in fused)
            out = self.forward(layer, q, k, v)
            self.remember(layer, k, v)
            self.check(layer, q, out)

    def remember(self, layer, k, v):
        at = 0
        for request, count in self.queries.items():
            new = torch.stack([k, v], 1)[at : at + count].double()
            if layer.kv_sharing_target_layer_name is None:
                self.given[request, layer.layer_name] = torch.cat([self.given.get((request, layer.layer_name), new[:0]), new])
            at += count

    def stored(self, layer, request):
        """K and V of a request as vLLM says that they lie in the layer's cache, [tokens, 2, heads_kv, d] in float64."""
        rows = torch.tensor([int(block) for block in self.tables[request]], dtype=torch.int64)
        content = layer.kv_cache.transpose(1, 2)[rows].flatten(0, 1)[: self.lengths[request]]  # [tokens, heads_kv, content]
        sides = []
        for which, half in enumerate(content.split(content.shape[-1] // 2, dim=-1)):
            codes = half[..., : self.d]
            if self.kv_cache_dtype.startswith("fp8"):
                codes = codes.view(torch.float8_e5m2 if self.kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn).float()
            if self.kv_cache_dtype.endswith("per_token_head"):
                scale = half[..., self.d :].contiguous().view(torch.float32).double()
            else:
                scale = (layer._k_scale, layer._v_scale)[which].double().reshape(-1, 1)
                scale = scale if self.kv_cache_dtype.startswith("fp8") else torch.ones_like(scale)
            sides.append(codes.double() * scale)
        return torch.stack(sides, 1)

    def check(self, layer, q, out):
        options = self.options[self.layers.index(layer)]
        histories = [self.stored(layer, request).numpy() for request in self.queries]
        for request, history in zip(self.queries, histories):
            given = self.given[request, owner(layer)].numpy()
            # Half a step of the codes: of 8 bits, 2^-4 (e4m3), 2^-3 (e5m2) of a value or 2^-8 of the row's largest; else none.
            step = {"fp8": 2**-4, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "fp8_per_token_head": 2**-4}.get(self.kv_cache_dtype, 0)
            row = 0.51 / 127 if self.kv_cache_dtype.startswith("int8") else 2**-9 if step else 0
            bound = step * np.abs(given) + row * np.abs(given).max(axis=-1, keepdims=True)
            assert (np.abs(history - given) <= bound).all(), "what is in the cache is not what was given"
        fields = {"causal": True, "softmax_scale": self.d**-0.5}
        if options.get("per_layer_sliding_window"):
            fields["window_left"] = options["per_layer_sliding_window"] - 1
        if options.get("logits_soft_cap"):
            fields["softcap"] = options["logits_soft_cap"]
        if options.get("alibi_slopes"):
            fields["alibi_slopes"] = np.float32(options["alibi_slopes"])
            fields["alibi_sqrt"] = options.get("use_alibi_sqrt", False)
        if "sinks" in options:
            fields["sinks"] = options["sinks"].detach().float().numpy()
        counts = list(self.queries.values())
        tokens = sum(counts)
        expected = reference.attention(
            q[:tokens].float().numpy(), np.concatenate([history[:, 0] for history in histories]),
            np.concatenate([history[:, 1] for history in histories]), cu_seqlens_q=np.int32([0, *np.cumsum(counts)]),
            cu_seqlens_kv=np.int32([0, *np.cumsum([len(history) for history in histories])]), **fields)
        self.compare(layer, out[:tokens], expected, dtype_name(q))

    def compare(self, layer, out, expected, dtype):
        assert_attention(out.float().numpy(), None, None, expected, dtype)
