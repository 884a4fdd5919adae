# SPDX-License-Identifier: Apache-2.0
"""vLLM's own Llama on this backend, prompts in chunks beside decoding requests: its logits are those of the Llama of transformers,
which has the same weights and sees each sequence at once."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import CacheConfig, CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context

import attune.integrations.vllm as integration

integration.register()

from attune.integrations.vllm.backend import AttuneBackend  # noqa: E402
from engine import BLOCK_SIZE, Engine  # noqa: E402

CONFIG = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
                     num_key_value_heads=2, head_dim=8, max_position_embeddings=256)


class ModelEngine(Engine):
    def __init__(self, weights, rendezvous):
        # No compilation and no compiled operators: vLLM's own reference implementations of what is around attention.
        self.config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=BLOCK_SIZE),
                                 compilation_config=CompilationConfig(mode=CompilationMode.NONE, custom_ops=["none"]))
        self.config.cache_config.kv_cache_layout = "BLNHC"
        self.config.model_config = SimpleNamespace(
            dtype=torch.float32, head_dtype=torch.float32, is_mm_prefix_lm=False, rswa_window=None, max_model_len=256, hf_config=CONFIG,
            hf_text_config=CONFIG, quantization=None, is_moe=False, use_mla=False, multimodal_config=None, runner_type="generate",
            logits_processor_pattern=None, get_vocab_size=lambda: CONFIG.vocab_size)
        with set_current_vllm_config(self.config):
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            initialize_model_parallel(1, 1)
            self.model = importlib.import_module("vllm.model_executor.models.llama").LlamaForCausalLM(vllm_config=self.config)
        assert len(self.model.load_weights(weights.items())) == len(dict(self.model.named_parameters()))
        self.layers = [layer.self_attn.attn for layer in self.model.model.layers]
        self.bind()
        self.tables, self.lengths = {}, {}
        self.free = list(np.random.default_rng(0).permutation(np.arange(1, 40)))

    def hidden(self, ids, queries):
        at = {request: self.lengths.get(request, 0) for request in queries}
        self.step(queries)
        positions = torch.cat([torch.arange(at[request], at[request] + count) for request, count in queries.items()])
        tokens = torch.cat([ids[request][at[request] : at[request] + count] for request, count in queries.items()])
        with set_forward_context(self.metadata, self.config, slot_mapping=self.slots):
            return self.model(tokens, positions), at


@torch.no_grad()
def test_logits_of_llama(monkeypatch, tmp_path):
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(CONFIG).eval().float()
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6)  # as it is made, attention would be uniform
    # There is no platform here whose selector could be asked for a backend by name: contract.py asks CUDA's.
    monkeypatch.setattr("vllm.model_executor.layers.attention.attention.get_attn_backend", lambda *_, **__: AttuneBackend)
    engine = ModelEngine(theirs.state_dict(), tmp_path / "rendezvous")
    ids = {request: torch.randint(1, CONFIG.vocab_size, (40,)) for request in "ab"}
    exact = {request: theirs(tokens[None]).logits[0] for request, tokens in ids.items()}
    for queries in ({"a": 20, "b": 3}, {"a": 1, "b": 1}, {"b": 10, "a": 1}, {"a": 4, "b": 4}, {"a": 1}):
        hidden, at = engine.hidden(ids, queries)
        logits = hidden @ theirs.lm_head.weight.T
        want = torch.cat([exact[request][at[request] : at[request] + count] for request, count in queries.items()])
        assert want.std() > 0.1
        torch.testing.assert_close(logits, want, atol=1e-5 * float(want.abs().max()), rtol=0)
        assert torch.equal(logits.argmax(-1), want.argmax(-1))
