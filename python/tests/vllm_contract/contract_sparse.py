# SPDX-License-Identifier: Apache-2.0
"""ATTUNE_MLA_SPARSE under vLLM's own MLAAttention and sparse metadata, against attention over the chosen keys in float64. The cache and
the indexer's buffer are filled by the test."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import attune
import attune.integrations.vllm as integration

integration.register()
if integration.backend_name() == "CUSTOM":
    pytest.skip("this vLLM takes no new names of backends: there is no ATTUNE_MLA_SPARSE", allow_module_level=True)

from attune.integrations.vllm import sparse  # noqa: E402
from attune.integrations.vllm.sparse import AttuneMLASparseBackend, AttuneMLASparseImpl  # noqa: E402
from contract import ASKED  # noqa: E402
from contract_mla import HEADS, LATENT, NOPE, ROPE, MlaEngine, NoPrompts, V  # noqa: E402
from engine import BLOCK_SIZE, MAX_BLOCKS  # noqa: E402

TOPK, MAX_TOKENS = 16, 256


class SparseEngine(MlaEngine):
    """Layers with an indexer each, whose choices are random: up to TOPK tokens that a query sees."""

    def __init__(self, kv_cache_dtype="auto", dtype=torch.float32, layers=3, layout="LBNHC", config=()):
        self.dtype, self.kv_cache_dtype = dtype, kv_cache_dtype
        self.config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(
            block_size=BLOCK_SIZE, cache_dtype=kv_cache_dtype))
        self.config.cache_config.kv_cache_layout = layout
        self.config.scheduler_config.max_num_batched_tokens = MAX_TOKENS
        self.config.attention_config.sparse_mla_force_mqa = True
        for name, value in dict(config).items():
            setattr(self.config.attention_config, name, value)
        self.config.model_config = SimpleNamespace(
            dtype=dtype, is_mm_prefix_lm=False, rswa_window=None, max_model_len=2048, get_head_size=lambda: LATENT + ROPE,
            get_num_attention_heads=lambda parallel: HEADS, hf_text_config=SimpleNamespace(
                index_topk=TOPK, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, q_lora_rank=None),
            model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS))
        self.buffer = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(self.config):
                self.layers = []
                for i in range(layers):
                    projection = torch.nn.Linear(LATENT, HEADS * (NOPE + V), bias=False)
                    projection.quant_method = None
                    self.layers.append(mla_attention.MLAAttention(
                        HEADS, (NOPE + ROPE) ** -0.5, NOPE, ROPE, V, None, LATENT, projection, cache_config=self.config.cache_config,
                        prefix=f"model.layers.{i}.attn", attn_backend=AttuneMLASparseBackend, prefill_backend_cls=NoPrompts,
                        use_sparse=True, indexer=SimpleNamespace(topk_indices_buffer=self.buffer), topk_indices_buffer=self.buffer))
                    self.layers[-1].process_weights_after_loading(dtype)
        finally:
            torch.set_default_dtype(default)
        self.bind()
        self.tables, self.lengths, self.latents = {}, {}, {}
        self.free = list(np.random.default_rng(0).permutation(np.arange(1, 40)))

    def fill(self, layer, request):
        """Rows of the cache, which vLLM's own operation would have written -> what they say, [tokens, latent and rope channels]."""
        rows = self.latents.setdefault((request, layer.layer_name),
                                       torch.randn(MAX_BLOCKS * BLOCK_SIZE, LATENT + ROPE).to(self.dtype))
        stored = rows
        if self.kv_cache_dtype == "fp8_ds_mla":  # flashmla_sparse.py has the format
            groups = rows[:, :LATENT].float().unflatten(1, (4, 128))
            scales = groups.abs().amax(-1, keepdim=True) / 448
            codes = (groups / scales).to(torch.float8_e4m3fn)
            stored = torch.cat([codes.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8),
                                rows[:, LATENT:].bfloat16().view(torch.uint8)], dim=1)
            rows = torch.cat([(codes.float() * scales).flatten(1), rows[:, LATENT:].float()], dim=1)
        for position in range(self.lengths[request]):
            block = int(self.tables[request][position // BLOCK_SIZE])
            layer.kv_cache[block, position % BLOCK_SIZE] = stored[position]
        return rows[: self.lengths[request]]

    def choose(self, queries):
        """Writes the buffer as an indexer does; -1 behind the last choice."""
        self.buffer.fill_(-1)
        row = 0
        for request, count in queries.items():
            for i in range(count):
                seen = self.lengths[request] - count + i + 1
                chosen = torch.randperm(seen)[:TOPK]
                self.buffer[row, : len(chosen)] = chosen.int()
                row += 1

    def run(self, queries, **padding):
        metadata = self.step(queries, **padding)
        tokens = sum(queries.values())
        for layer in self.layers:
            latents = {request: self.fill(layer, request) for request in queries}
            self.choose(queries)
            q = torch.randn(metadata.num_actual_tokens, HEADS, NOPE + ROPE).to(self.dtype)
            out = torch.full((metadata.num_actual_tokens, HEADS * V), torch.nan, dtype=self.dtype)
            with set_forward_context(self.metadata, self.config, slot_mapping=self.slots):
                layer.forward_impl(q, torch.zeros(len(q), LATENT, dtype=self.dtype), torch.zeros(len(q), 1, ROPE, dtype=self.dtype),
                                   layer.kv_cache, metadata, output=out)
            self.check(layer, q[:tokens].double(), out[:tokens].view(-1, HEADS, V).double(), queries, latents)
        return metadata

    def check(self, layer, q, out, queries, latents):
        row = 0
        bound = 2e-5 if self.dtype == torch.float32 else 2e-2
        for request, count in queries.items():
            latent = latents[request].double()
            up = (latent[:, :LATENT] @ layer.kv_b_proj.weight.double().T).view(-1, HEADS, NOPE + V)
            k = torch.cat([up[..., :NOPE], latent[:, None, LATENT:].expand(-1, HEADS, -1)], dim=-1)
            for _ in range(count):
                chosen = self.buffer[row][self.buffer[row] >= 0].long()
                weights = torch.einsum("hd,thd->ht", q[row], k[chosen]).mul((NOPE + ROPE) ** -0.5).softmax(-1)
                torch.testing.assert_close(out[row], torch.einsum("ht,thd->hd", weights, up[chosen][..., NOPE:]), atol=bound, rtol=bound)
                row += 1


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(sparse_mla_attention, "PIN_MEMORY", False)  # needs a GPU


@pytest.mark.parametrize("kv_cache_dtype, dtype, layout", [
    ("auto", torch.float32, "LBHNC"), ("auto", torch.bfloat16, "BLNHC"), ("bfloat16", torch.bfloat16, "LBNHC"),
    ("fp8_ds_mla", torch.bfloat16, "LBNHC"), ("fp8_ds_mla", torch.bfloat16, "BLNHC")])
def test_steps(kv_cache_dtype, dtype, layout):
    engine = SparseEngine(kv_cache_dtype, dtype, layout=layout)
    engine.lengths = {"a": 37, "b": 3, "c": 16}
    engine.run({"a": 1, "b": 1, "c": 1})
    engine.run({"a": 4, "b": 2, "c": 3})  # speculative tokens
    engine.run({"c": 1, "a": 1}, pad_tokens=2, pad_reqs=2)
    metadata = engine.run({"c": 1, "d": 20, "b": 30})  # prompts
    assert metadata.num_actual_tokens == 51
    assert engine.builder.get_cudagraph_support(engine.config, None) == AttentionCGSupport.UNIFORM_BATCH


def test_layers_share_a_schedule_and_plans(monkeypatch):
    engine = SparseEngine()
    engine.lengths = {"a": 37, "b": 3}
    calls = []
    for name, real in (("run", attune.Plan.run), ("run_scheduled", attune.Plan.run_scheduled)):
        monkeypatch.setattr(attune.Plan, name, lambda plan, name=name, real=real, **fields: (calls.append(name), real(plan, **fields)))
    steps = [engine.run({"a": 1, "b": 1}).step for _ in range(2)]
    assert calls == 2 * ["run", "run_scheduled", "run_scheduled"]
    assert steps[0].topk_length.data_ptr() == steps[1].topk_length.data_ptr()  # captured graphs read it
    assert steps[1].topk_length.tolist() == [16, 5]
    assert len(engine.builder._plans._plans) == 1


def test_lists_that_vllms_kernel_turns_into_slots(monkeypatch):
    """Triton is not here: its signature is vLLM's, and what it answers is what its description says."""
    tokens = torch.tensor([[5, -1, 16, 99], [-1, 3, -1, 31]], dtype=torch.int32)
    request, table = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[7, 2], [4, 9]], dtype=torch.int32)
    wanted = [[4 * 16 + 5, 9 * 16, -1, -1], [7 * 16 + 3, 2 * 16 + 15, -1, -1]]
    assert sparse.slots_of(tokens, request, table, 16).tolist() == wanted
    kernel = mock.create_autospec(sparse_utils.triton_convert_req_index_to_global_index, return_value=(tokens, request))
    monkeypatch.setattr(sparse_utils, "triton_convert_req_index_to_global_index", kernel)
    monkeypatch.setattr(sparse, "HAS_TRITON", True)
    assert sparse.slots_of(tokens, request, table, 16) is tokens
    assert kernel.call_args.kwargs == {"BLOCK_SIZE": 16, "NUM_TOPK_TOKENS": 4, "return_valid_counts": True}


def test_what_is_refused():
    asked = {**ASKED, "use_mla": True, "use_sparse": True, "head_size": 576}
    for taken in ({}, {"kv_cache_dtype": "fp8_ds_mla"}, {"block_size": 64}, {"dtype": torch.float16}):
        assert AttuneMLASparseBackend.validate_configuration(**{**asked, **taken}) == []
    assert AttentionBackendEnum.ATTUNE_MLA_SPARSE.get_class() is AttuneMLASparseBackend
    for change, reason in (
            ({"use_mla": False}, "non-MLA"), ({"use_sparse": False}, "non-sparse"), ({"use_pcp": True}, "PCP"), ({"use_dcp": True}, "DCP"),
            ({"kv_cache_dtype": "fp8"}, "it is fp8, and auto, float16, bfloat16, fp8_ds_mla are"), ({"head_size": 320}, "head_size"),
            ({"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16}, "dtype=torch.float16"),
            ({"device_capability": DeviceCapability(7, 5)}, "the kernels need 8.0")):
        reasons = AttuneMLASparseBackend.validate_configuration(**{**asked, **change})
        assert reason in reasons[0] and reasons[-1].startswith("nearest backend"), reasons
    for change, sibling in (({"use_mla": False, "use_sparse": False, "head_size": 64}, "ATTUNE"), ({"use_sparse": False}, "ATTUNE_MLA")):
        assert AttuneMLASparseBackend.validate_configuration(**{**asked, **change})[-1] == f"nearest backend that takes it: {sibling}"
    for change, reason in (({"sliding_window": 8}, "sliding_window=8"), ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype='nvfp4'")):
        given = {"num_heads": 16, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None,
                 "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None}
        with pytest.raises(NotImplementedError, match=f"ATTUNE_MLA_SPARSE: {reason} is not covered"):
            AttuneMLASparseImpl(**{**given, **change})
    with pytest.raises(NotImplementedError, match="ATTUNE_MLA_SPARSE: hisparse_config='host' is not covered; FLASHMLA_SPARSE"):
        SparseEngine(config={"hisparse_config": "host"})
