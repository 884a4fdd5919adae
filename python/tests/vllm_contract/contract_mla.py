# SPDX-License-Identifier: Apache-2.0
"""ATTUNE_MLA under vLLM's own MLAAttention: decode steps, against attention over up-projected keys in float64. Prompts are none of
its own, so there are none here: the cache is filled by the test."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata

import attune
import attune.integrations.vllm as integration

integration.register()
if integration.backend_name() == "CUSTOM":
    pytest.skip("this vLLM takes no new names of backends: there is no ATTUNE_MLA", allow_module_level=True)

from attune.integrations._latent import queries, rope_apart  # noqa: E402
from attune.integrations.vllm.mla import AttuneMLABackend, AttuneMLAImpl  # noqa: E402
from contract import ASKED  # noqa: E402
from engine import BLOCK_SIZE, MAX_BLOCKS, PAD_SLOT, Engine  # noqa: E402

HEADS, NOPE, ROPE, LATENT, V = 16, 32, 64, 512, 48


class NoPrompts(MLAPrefillBackend):
    """Stands where vLLM's own kernels for prompts would; no test here has one."""

    get_name = staticmethod(lambda: "NO_PROMPTS")

    def run_prefill_new_tokens(self, *arguments, **options):
        raise AssertionError("a decode step has no prompt")

    run_prefill_context_chunk = run_prefill_new_tokens


class MlaEngine(Engine):
    """Layers of latent attention; `stored` is what the test has put into their caches."""

    def __init__(self, layers=2, layout="LBNHC", speculative_tokens=0, kv_cache_dtype="auto", **parallel):
        self.dtype, self.kv_cache_dtype = torch.float32, kv_cache_dtype
        self.config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(
            block_size=BLOCK_SIZE, cache_dtype=kv_cache_dtype))
        self.config.cache_config.kv_cache_layout = layout
        self.config.model_config = SimpleNamespace(
            dtype=self.dtype, is_mm_prefix_lm=False, rswa_window=None, max_model_len=2048, get_head_size=lambda: LATENT + ROPE,
            get_num_attention_heads=lambda parallel: HEADS, hf_text_config=SimpleNamespace())
        for name, value in parallel.items():
            setattr(self.config.parallel_config, name, value)
        if speculative_tokens:
            self.config.speculative_config = SimpleNamespace(
                num_speculative_tokens=speculative_tokens, parallel_drafting=False, enable_adaptive_verification=False)
        with set_current_vllm_config(self.config):
            self.layers = []
            for i in range(layers):
                projection = torch.nn.Linear(LATENT, HEADS * (NOPE + V), bias=False)
                projection.quant_method = None  # as vLLM's own layers have it
                self.layers.append(mla_attention.MLAAttention(
                    HEADS, (NOPE + ROPE) ** -0.5, NOPE, ROPE, V, None, LATENT, projection, cache_config=self.config.cache_config,
                    prefix=f"model.layers.{i}.attn", attn_backend=AttuneMLABackend, prefill_backend_cls=NoPrompts))
                self.layers[-1].process_weights_after_loading(self.dtype)
        self.bind()
        self.tables, self.lengths, self.latents = {}, {}, {}
        self.free = list(np.random.default_rng(0).permutation(np.arange(1, 40)))

    def fill(self, layer, request):
        """Latent rows of all tokens of a request, also those that the step before has put there."""
        rows = self.latents.setdefault((request, layer.layer_name), torch.randn(MAX_BLOCKS * BLOCK_SIZE, LATENT + ROPE))
        stored = rows
        if self.kv_cache_dtype == "fp8":
            layer._k_scale.fill_(0.02)
            codes = (rows / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored, rows = codes.view(torch.uint8), codes.float() * 0.02
        for position in range(self.lengths[request]):
            if (slot := self.slot(request, position)) != PAD_SLOT:
                layer.kv_cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = stored[position]
        return rows[: self.lengths[request]]

    def run(self, queries, **padding):
        metadata = self.step(queries, **padding)
        tokens = sum(queries.values())
        for layer in self.layers:
            latents = {request: self.fill(layer, request) for request in queries}
            q = torch.randn(metadata.num_actual_tokens, HEADS, NOPE + ROPE)
            out = torch.full((metadata.num_actual_tokens, HEADS * V), torch.nan)
            layer.forward_impl(q, torch.zeros(len(q), LATENT), torch.zeros(len(q), 1, ROPE), layer.kv_cache, metadata, output=out)
            self.check(layer, q[:tokens].double(), out[:tokens].view(-1, HEADS, V), queries, latents)
        return metadata

    def check(self, layer, q, out, queries, latents):
        row = 0
        for request, count in queries.items():
            latent = latents[request].double()
            up = (latent[:, :LATENT] @ layer.kv_b_proj.weight.double().T).view(-1, HEADS, NOPE + V)
            k = torch.cat([up[..., :NOPE], latent[:, None, LATENT:].expand(-1, HEADS, -1)], dim=-1)
            for i in range(count):
                seen = len(latent) - count + i + 1
                weights = torch.einsum("hd,thd->ht", q[row], k[:seen]).mul((NOPE + ROPE) ** -0.5).softmax(-1)
                torch.testing.assert_close(out[row].double(), torch.einsum("ht,thd->hd", weights, up[:seen, :, NOPE:]), atol=2e-5,
                                           rtol=2e-5)
                row += 1


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_decode(layout):
    engine = MlaEngine(layout=layout)
    for request, length in (("a", 37), ("b", 3), ("c", 16)):
        engine.lengths[request] = length
    engine.run({"a": 1, "b": 1, "c": 1})
    metadata = engine.run({"c": 1, "a": 1}, pad_tokens=2, pad_reqs=2)
    assert metadata.num_prefills == 0 and metadata.decode.step.query_start_loc is None
    assert engine.builder.get_cudagraph_support(engine.config, None) == AttentionCGSupport.UNIFORM_BATCH


def test_latents_of_8_bits():
    engine = MlaEngine(kv_cache_dtype="fp8")
    engine.lengths = {"a": 37, "b": 3}
    engine.run({"a": 1, "b": 1})
    engine.run({"b": 1, "a": 1}, pad_tokens=2, pad_reqs=2)


def test_speculative_tokens():
    engine = MlaEngine(speculative_tokens=3)
    engine.lengths = {"a": 37, "b": 3, "c": 16}
    metadata = engine.run({"a": 4, "b": 4, "c": 4})
    assert metadata.num_prefills == 0 and metadata.decode.step.max_query_len == 4
    engine.run({"a": 2, "b": 4, "c": 1})


def test_parts_of_a_query_are_not_joined():
    """As vLLM hands them: latent channels of a transposed product, rope channels as columns of wider rows."""
    whole = torch.randn(3, 16, LATENT + ROPE)
    parts = torch.randn(16, 3, LATENT).transpose(0, 1), torch.randn(3, 16, NOPE + ROPE)[..., NOPE:]
    assert rope_apart(LATENT + ROPE, LATENT) == ROPE
    given = queries(*parts, ROPE)
    assert given["q"] is parts[0] and given["q_rope"] is parts[1]
    of_whole = queries(whole, None, ROPE)
    assert [of_whole[name].data_ptr() for name in ("q", "q_rope")] == [whole.data_ptr(), whole[..., LATENT:].data_ptr()]
    # Other latents have no kernel of a GPU that takes them apart.
    assert rope_apart(256 + ROPE, 256) == rope_apart(512, 512) == rope_apart(128, 128) == 0
    assert torch.equal(queries(*parts, 0)["q"], torch.cat(parts, -1)) and queries(whole, None, 0) == {"q": whole}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_registry_says_which_gpus(capability):
    reasons = AttuneMLABackend.validate_configuration(**{**ASKED, "use_mla": True, "head_size": 576,
                                                         "device_capability": DeviceCapability(*capability)})
    step = attune.supported(attune.Spec((2, 16, 576), "bfloat16"), cache=attune.KVCache(
        attune.Spec((2, 16, 1, 576), "bfloat16"), page_table=attune.Spec((2, 2), "int32")), seqused_kv=attune.Spec((2,), "int32"),
        causal=True, head_dim_v=512, capability=capability)
    assert step.reason in " ".join(reasons) if reasons else step


def test_what_is_refused():
    asked = {**ASKED, "use_mla": True, "head_size": 576}
    assert AttuneMLABackend.validate_configuration(**asked) == []
    with torch.device("meta"):  # as vLLM makes the GPU the default while it builds a model
        assert AttuneMLABackend.validate_configuration(**asked) == []
    assert AttentionBackendEnum.ATTUNE_MLA.get_class() is AttuneMLABackend
    for change, reason in (({"use_mla": False}, "non-MLA"), ({"use_sparse": True}, "sparse"), ({"use_pcp": True}, "PCP"),
                           ({"kv_cache_dtype": "fp8_e5m2"}, "it is fp8_e5m2"), ({"head_size": 320}, "head_size=320.*lacks head_dim_qk: 320"),
                           ({"head_size": 600}, "head_size not supported: it is 600, and 320, .*576 are"),
                           ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8.*cuda_mla.*e4m3"),
                           ({"device_capability": DeviceCapability(7, 5)}, "the kernels need 8.0")):
        reasons = AttuneMLABackend.validate_configuration(**{**asked, **change})
        assert re.search(reason, reasons[0]) and reasons[-1].startswith("nearest backend"), reasons
    for change, sibling in (({"use_mla": False, "head_size": 64}, "ATTUNE"), ({"use_sparse": True}, "ATTUNE_MLA_SPARSE")):
        assert AttuneMLABackend.validate_configuration(**{**asked, **change})[-1] == f"nearest backend that takes it: {sibling}"
    for change, reason in (({"sliding_window": 8}, "sliding_window=8"), ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype='nvfp4'")):
        given = {"num_heads": 16, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None,
                 "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None}
        with pytest.raises(NotImplementedError, match=f"ATTUNE_MLA: {reason} is not covered"):
            AttuneMLAImpl(**{**given, **change})
