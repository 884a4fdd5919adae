# SPDX-License-Identifier: Apache-2.0
"""Latent attention under SGLang's own MLATokenToKVPool: absorbed layers of decode, chunks and verification, and prompts over
up-projected keys, which SGLang's DeepSeek models send to the two RadixAttention of a layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import stand_ins  # noqa: F401, I001  before SGLang
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import attention_backend_handler

import attune.integrations.sglang as integration
from attune.integrations.sglang import coverage
from attune.integrations.sglang.mla import AttuneMLABackend
from compare import assert_attention, dtype_name

integration.register()

from engine import TOKENS, Engine, attention, model_config  # noqa: E402
from graphs import Graph, RecordedPlan, recorded  # noqa: E402, F401

LATENT, ROPE, NOPE, V = 512, 64, 128, 128


class MlaEngine(Engine):
    pool_class, backend_class = MLATokenToKVPool, AttuneMLABackend

    def __init__(self, count=2, *, config=None, **options):
        config = model_config(AttentionArch.MLA, config, num_attention_heads=2, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
                              qk_rope_head_dim=ROPE)
        super().__init__([{}] * count, heads=2, heads_kv=1, d=LATENT + ROPE, d_v=LATENT, use_mla_backend=True, model_config=config,
                         **options)
        assert type(self.backend) is self.backend_class

    def make_layers(self):
        self.prompts = [RadixAttention(self.heads, NOPE + ROPE, (NOPE + ROPE) ** -0.5, self.heads, i, v_head_dim=V)
                        for i in range(len(self.options))]  # "attn_mha" of a model, beside "attn_mqa"
        return super().make_layers()

    def modules(self):
        return [*self.layers, *self.prompts]

    def make_pool(self, window_layers):
        pool = self.pool_class(TOKENS - self.page_size, self.page_size, self.kv_cache_dtype, LATENT, ROPE, len(self.options), "cpu",
                               False)
        for buffer in pool.kv_buffer:
            buffer.view(torch.uint8).fill_(0xFF)
        return pool

    def inputs(self, tokens):
        """q, and K and V of the latent row, as forward_absorb_core has them."""
        row = torch.randn(tokens, 1, LATENT + ROPE).to(self.dtype)
        return torch.randn(tokens, self.heads, LATENT + ROPE).to(self.dtype), row, row[..., :LATENT]

    def run_prompt(self, queries):
        """Prompts without a prefix: the latent rows go to the cache, attention is over keys and values of all heads."""
        batch = self.batch(ForwardMode.EXTEND, queries)
        self.backend.init_forward_metadata(batch)
        starts = [0, *np.cumsum(list(queries.values()))]
        for layer, prompt in zip(self.layers, self.prompts):
            _, row, value = self.inputs(starts[-1])
            self.pool.set_kv_buffer(layer, batch.out_cache_loc, row, value)
            self.remember(layer, queries, row, value)
            q, k = (torch.randn(starts[-1], self.heads, NOPE + ROPE).to(self.dtype) for _ in "qk")
            v = torch.randn(starts[-1], self.heads, V).to(self.dtype)
            out = self.forward(prompt, q, k, v, batch, save_kv_cache=False)
            for first, last in zip(starts, starts[1:]):
                expected = attention(*(x[first:last].double().numpy() for x in (q, k, v)), prompt.scaling)
                assert_attention(out[first:last].view(-1, self.heads, V).float().numpy(), None, None, expected, dtype_name(q))


@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_chunks_and_decode(page_size):
    engine = MlaEngine(page_size=page_size)
    engine.run_prompt({"a": 11, "b": 3})
    engine.run({"a": 1, "b": 1})
    engine.run({"b": 7, "a": 1}, mode=ForwardMode.MIXED)
    engine.run({"a": 1})


def test_bfloat16():
    engine = MlaEngine(1, dtype=torch.bfloat16)
    engine.run_prompt({"a": 11, "b": 1})
    engine.run({"b": 1, "a": 1})


@pytest.mark.parametrize("page_size, drafts, topk", [(1, 0, 1), (16, 3, 1), (1, 4, 2)])
def test_graphs(page_size, drafts, topk):
    engine = MlaEngine(page_size=page_size, drafts=drafts, topk=topk)
    count = drafts or 1
    engine.backend.init_cuda_graph_state(3, 3 * count)
    graph = Graph(engine, 3)
    engine.run_prompt({"a": 11, "b": 3})
    graph.replay({"a": count, "b": count})
    engine.run({"c": 6})
    graph.replay({"c": count, "a": count, "b": count})
    if drafts:
        engine.run({"b": count, "a": count}, mode=ForwardMode.TARGET_VERIFY)


def test_parts_of_rows_that_are_given_apart():
    """As models do it for backends that SGLang knows by name."""
    engine = MlaEngine(1)
    for count in (5, 1):
        batch = engine.batch(ForwardMode.EXTEND, {"a": count})
        engine.backend.init_forward_metadata(batch)
        q, row, value = engine.inputs(count)
        engine.remember(engine.layers[0], {"a": count}, row, value)
        out = engine.forward(engine.layers[0], q[..., :LATENT], row[..., :LATENT], value, batch, q_rope=q[..., LATENT:],
                             k_rope=row[..., LATENT:])
        engine.check(engine.layers[0], {"a": count}, q, out)


def test_prompts_share_a_plan_and_a_schedule(monkeypatch):
    calls = []

    def record(self, function, changes):
        calls.append((function.__name__, "k" in changes))
        return function(**changes)

    monkeypatch.setattr(RecordedPlan, "_record", record)
    engine = MlaEngine(3)
    engine.run_prompt({"a": 11, "b": 3})
    assert calls == [("run", True), ("run_scheduled", True), ("run_scheduled", True)]
    calls.clear()
    engine.run({"a": 1, "b": 1})
    assert calls == [("run", False), ("run_scheduled", False), ("run_scheduled", False)]


def test_deepseek_models_send_what_is_taken():
    """A backend whose name they do not know is one with concatenated rows, and prompts without a prefix over all heads."""
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    assert "attune" not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    registry = attention_backend_handler.AttentionBackendRegistry
    assert registry.get_handler("attune") is attention_backend_handler.handle_attention_triton


@pytest.mark.parametrize("kv_cache_dtype, page_size", [(torch.float8_e4m3fn, 1), (torch.float8_e5m2, 16)])
def test_eight_bit_latents(kv_cache_dtype, page_size):
    """Rows of latent and rope channels in 8 bits, without scales: on the CPU."""
    engine = MlaEngine(kv_cache_dtype=kv_cache_dtype, dtype=torch.bfloat16, page_size=page_size)
    engine.layers[0].k_scale, engine.layers[0].k_scale_float = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False), 1.0
    engine.run_prompt({"a": 11, "b": 3})
    engine.run({"a": 1, "b": 1})
    engine.run({"b": 7, "a": 2})


def test_eight_bit_latents_that_are_refused(monkeypatch):
    runner = MlaEngine(1, kv_cache_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16).runner
    (layer, *_) = (module for module in runner.model if module.v_head_dim == LATENT)
    layer.k_scale, layer.k_scale_float = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False), 0.5
    with pytest.raises(NotImplementedError, match="attune: k_scale=0.5 is not covered.*: triton"):
        integration.create(runner)
    layer.k_scale = layer.k_scale_float = None
    monkeypatch.setattr(coverage, "capability_of", lambda device: (9, 0))
    with pytest.raises(NotImplementedError, match=r"capability 9\.0 takes.*kv_cache_dtype=torch.float8_e4m3fn: .*e4m3.*: flashmla"):
        integration.create(runner)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_gpus_that_the_registry_has_kernels_for(capability, monkeypatch):
    monkeypatch.setattr(coverage, "capability_of", lambda device: capability)
    MlaEngine(1, dtype=torch.bfloat16)
    if capability == (9, 0):
        MlaEngine(1, dtype=torch.bfloat16, drafts=4, topk=2)
        return
    with pytest.raises(NotImplementedError, match="speculative_eagle_topk > 1: .*: triton"):
        MlaEngine(1, dtype=torch.bfloat16, drafts=4, topk=2)


def test_what_is_refused(monkeypatch):
    runner = MlaEngine().runner
    runner.token_to_kv_pool = object.__new__(SWAKVPool)
    with pytest.raises(NotImplementedError, match="attune: token_to_kv_pool='SWAKVPool' is not covered.*: triton"):
        integration.create(runner)

    class PoolOfAnother(MLATokenToKVPool):
        pass

    monkeypatch.setattr(MlaEngine, "pool_class", PoolOfAnother)
    with pytest.raises(NotImplementedError, match="attune: token_to_kv_pool='PoolOfAnother' is not covered.*: triton"):
        MlaEngine()


def test_chunks_of_a_prefix_are_refused():
    engine = MlaEngine(1)
    batch = engine.batch(ForwardMode.EXTEND, {"a": 5})
    engine.backend.init_forward_metadata(batch)
    batch.mha_return_lse = True
    k = torch.randn(5, 2, NOPE + ROPE)
    with pytest.raises(NotImplementedError, match="attune: chunked prefix cache=True is not covered.*: flashinfer"):
        engine.forward(engine.prompts[0], k, k, k[..., :V], batch, save_kv_cache=False)
    with pytest.raises(NotImplementedError, match="attune: topk_indices='given' is not covered"):
        engine.forward(engine.layers[0], *engine.inputs(5), batch, topk_indices=torch.zeros(5, 2))
