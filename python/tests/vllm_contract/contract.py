# SPDX-License-Identifier: Apache-2.0
"""The backend under vLLM's own classes. Run by test_vllm.py, once for each version that was fetched, in a process of its own."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import inspect
import re
import sys
import types
import weakref

import pytest
import torch
import vllm
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import attune
import attune.integrations.vllm as integration
from attune.integrations import _plans as plans
from attune.integrations.vllm.backend import AttuneBackend
from attune.integrations.vllm.impl import AttuneImpl
from attune.integrations.vllm.metadata import AttuneMetadataBuilder

integration.register()
integration.register()  # each process may do so more than once

from engine import MAX_BLOCKS, Engine  # noqa: E402

SLOPES = [float(2.0**-n) for n in range(1, 9)]
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def serve(engine):
    """Prompts, in chunks and beside decoding requests; decode; speculative tokens; padding."""
    engine.run({"a": 20, "b": 3})
    engine.run({"a": 1, "b": 1})
    engine.run({"b": 1, "a": 1, "c": 37})
    engine.run({"c": 30, "a": 1})
    engine.run({"a": 4, "b": 4, "c": 4})
    engine.run({"a": 1, "b": 1, "c": 1}, pad_tokens=5, pad_reqs=5)
    engine.run({"a": 2, "c": 5}, pad_tokens=9, pad_reqs=2)
    engine.run({"c": 1, "b": 2}, pad_rows=3)


KINDS = {
    "plain": {}, "window": {"per_layer_sliding_window": 7}, "softcap": {"logits_soft_cap": 3.0}, "alibi": {"alibi_slopes": SLOPES},
    "alibi_sqrt": {"alibi_slopes": SLOPES, "use_alibi_sqrt": True}, "sinks": {"sinks": torch.linspace(-1, 2, 8)},
    "gpt_oss": {"per_layer_sliding_window": 16, "sinks": torch.linspace(-1, 2, 8)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    serve(Engine([{}, {}], layout=layout))


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "plain"])
def test_kinds_of_layers(kind):
    serve(Engine([KINDS[kind]]))


@pytest.mark.parametrize("dtype, heads, heads_kv, d", [(torch.float16, 8, 8, 64), (torch.bfloat16, 4, 1, 128)])
def test_dtypes_and_heads(dtype, heads, heads_kv, d):
    serve(Engine([{}], dtype=dtype, heads=heads, heads_kv=heads_kv, d=d))


def test_sinks_that_are_loaded_after_the_layer_is_made():
    sinks = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))  # of a model: it says that it requires grad
    engine = Engine([{"sinks": sinks}, {"sinks": sinks}], dtype=torch.bfloat16)
    sinks.data.copy_(torch.linspace(-1, 2, 8))
    serve(engine)


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"])
def test_eight_bit_caches(kv_cache_dtype, layout):
    engine = Engine([{}, {}], kv_cache_dtype=kv_cache_dtype, layout=layout, dtype=torch.bfloat16)
    for layer in engine.layers:
        layer._k_scale.fill_(0.02), layer._v_scale.fill_(0.03)
    serve(engine)


def test_a_layer_that_reads_the_cache_of_another():
    serve(Engine([{}, {"kv_sharing_target_layer_name": "model.layers.0.attn"}]))


def test_scales_of_heads():
    engine = Engine([{}, {}], kv_cache_dtype="fp8", dtype=torch.bfloat16)
    engine.layers[1]._k_scale, engine.layers[1]._v_scale = torch.tensor([0.01, 0.04]), torch.tensor([0.05, 0.02])
    serve(engine)


def test_layers_of_a_kind_share_a_schedule(monkeypatch):
    calls = []

    class Plan(attune.Plan):
        def run(self, **changes):
            calls.append("run")
            return super().run(**changes)

        def run_scheduled(self, **changes):
            calls.append("run_scheduled")
            return super().run_scheduled(**changes)

    monkeypatch.setattr(plans.attune, "Plan", Plan)
    engine = Engine([{}, KINDS["softcap"], {}, KINDS["softcap"], {}])
    engine.run({"a": 20, "b": 3})
    assert calls == ["run", "run", "run_scheduled", "run_scheduled", "run_scheduled"]
    calls.clear()
    engine.step({"a": 1, "b": 1})
    made = len(engine.builder._plans._plans)
    q, k, v = torch.randn(2, 8, 32), torch.randn(2, 2, 32), torch.randn(2, 2, 32)
    for _ in range(2):  # as a warm-up and a capture with the same metadata
        for layer in engine.layers:
            engine.forward(layer, q, k, v)
    assert calls == 2 * ["run", "run", "run_scheduled", "run_scheduled", "run_scheduled"]
    assert len(engine.builder._plans._plans) == made == 4  # all are made with the metadata: decode and not, of each kind


def test_steps_of_a_size_share_plans():
    engine = Engine([{}])
    engine.run({"a": 5, "b": 6, "c": 4})
    for lengths in ({"a": 8, "b": 7, "c": 1}, {"c": 6, "a": 8}, {"b": 7, "a": 1, "c": 7, "d": 1}):
        engine.run(lengths)
    assert len(engine.builder._plans._plans) == 2  # of up to four requests, and of two
    for request in "abc":
        engine.run({request: 1})
    assert len(engine.builder._plans._plans) == 3


@pytest.mark.parametrize("length", [1, 3, 33, 50, 100])
def test_plans_have_room_for_their_steps(length, monkeypatch):
    made = []

    class Plan(attune.Plan):
        def __init__(self, **fields):
            made.append(fields)
            super().__init__(**fields)

    monkeypatch.setattr(plans.attune, "Plan", Plan)
    engine = Engine([{}])
    engine.run({"a": length, "b": 2})
    engine.step({"a": 1, "b": 1}, capture=True)
    prompt, decode = made[0], made[-1]
    assert prompt["max_seqlen_q"] >= max(length, 2) and prompt["q"].shape[0] >= length + 2
    assert prompt["max_seqlen_kv"] is None or prompt["max_seqlen_kv"] >= length
    assert decode["max_seqlen_q"] == 1 and decode["cu_seqlens_q"] is None and decode["max_seqlen_kv"] >= 2048
    long = engine.builder._plans
    long.find(engine.layers[0].impl, decode["cache"], True, 2, 2, 1, plans.SHORT_SEQLEN_KV + 1, MAX_BLOCKS)
    assert made[-1]["max_seqlen_kv"] is None  # whatever the table holds


def test_lengths_that_grow_in_place():
    """A graph that was captured reads lengths where they are: the same metadata is right with other lengths."""
    engine = Engine([{}, {}])
    engine.run({"a": 20, "b": 3})
    metadata = engine.step({"a": 1, "b": 1}, capture=True)
    for lengths in ((20, 3), (7, 2)):
        metadata.step.seq_lens.copy_(torch.tensor(lengths))
        q = torch.randn(2, 8, 32)
        for layer in engine.layers:
            out = engine.forward(layer, q, None, None)  # no new keys: as after a fused kernel that wrote them
            for row, (request, length) in enumerate(zip("ab", lengths)):
                history = torch.tensor(engine.stored(layer, request).numpy()[:length]).repeat_interleave(4, 2)
                weights = torch.einsum("hd,thd->ht", q[row].double(), history[:, 0]).mul(32**-0.5).softmax(-1)
                torch.testing.assert_close(out[row].double(), torch.einsum("ht,thd->hd", weights, history[:, 1]), atol=1e-5, rtol=1e-5)


def test_a_graph_of_any_batch():
    """What is captured as one request for each token, with max_query_len as vLLM says it, is no decode step: it may become a prompt."""
    engine = Engine([{}])
    engine.run({"a": 20, "b": 3, "c": 1, "d": 2})
    assert engine.groups[0][0].get_metadata_builder(0).get_cudagraph_support(engine.config, None) == AttentionCGSupport.ALWAYS
    mixed = engine.step({"a": 1, "b": 1, "c": 1, "d": 1}, max_query_len=4, capture=True)
    assert mixed.step.query_start_loc is not None
    captured = mixed.step.plan(engine.layers[0].impl, engine.layers[0].impl.cache(engine.layers[0], engine.layers[0].kv_cache))
    replayed = engine.step({"a": 4}, pad_reqs=3, max_query_len=4)
    assert replayed.step.plan(engine.layers[0].impl, engine.layers[0].impl.cache(engine.layers[0], engine.layers[0].kv_cache)) is captured
    assert engine.step({"a": 1, "b": 1}, capture=True).step.query_start_loc is None


def test_profiling_run():
    engine = Engine([{}])
    out = engine.forward(engine.layers[0], *(torch.randn(3, heads, 32) for heads in (8, 2, 2)), metadata=None)
    assert out.shape == (3, 8, 32) and not out.any()


def test_new_caches_are_seen():
    """vLLM profiles with small caches, drops them, and binds others. What was made of the first must go with them."""
    engine = Engine([{}])
    engine.run({"a": 20})
    engine.given.clear(), engine.lengths.clear()
    first = weakref.ref(engine.layers[0].kv_cache)
    engine.layers[0].kv_cache = torch.tensor([])
    engine.builder = engine.groups = engine.metadata = None
    gc.collect()
    assert first() is None
    engine.config.compilation_config.static_forward_context[engine.layers[0].layer_name] = engine.layers[0]
    engine.bind()
    engine.run({"b": 20})


ASKED = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False, "has_sink": False,
         "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False, "attn_type": "decoder",
         "device_capability": DeviceCapability(9, 0)}


@pytest.mark.parametrize("change", [
    {}, {"head_size": 80, "has_sink": True, "has_sliding_window": True}, {"kv_cache_dtype": "fp8_e5m2"}, {"dtype": torch.float32},
    {"device_capability": DeviceCapability(8, 0)}, {"device_capability": DeviceCapability(12, 0), "has_sliding_window": True},
    {"device_capability": None}, {"kv_cache_dtype": "int8_per_token_head"}, {"use_per_head_quant_scales": True, "kv_cache_dtype": "fp8"}, {"block_size": 48}])
def test_what_is_taken(change):
    assert AttuneBackend.validate_configuration(**{**ASKED, **change}) == []
    with torch.device("meta"):  # as vLLM makes the GPU the default while it builds a model
        assert AttuneBackend.validate_configuration(**{**ASKED, **change}) == []


@pytest.mark.parametrize("change, reason", [
    ({"head_size": 600}, "head_size=600.*q has head_dim_qk 600; it must be 1..576"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported: it is nvfp4, and auto, .*int8_per_token_head are"),
    ({"dtype": torch.float64}, "dtype not supported: it is torch.float64, and torch.float16, "),
    ({"device_capability": DeviceCapability(7, 5)}, "GPU of compute capability 7.5 takes.*head_size=64.*the kernels need 8.0"),
    ({"device_capability": DeviceCapability(8, 6), "head_size": 300}, "no kernel of Attune on a GPU of compute capability 8.6 takes.*"
     "head_size=300.*head_dim_qk:? 300"),
    ({"use_mla": True}, "MLA not supported: use_mla is True"), ({"use_sparse": True}, "sparse not supported: use_sparse is True"),
    ({"use_mm_prefix": True}, "partial multimodal.*: use_mm_prefix is True"),
    ({"attn_type": "encoder_only"}, "attention type encoder_only not supported: attn_type is encoder_only"),
    ({"use_non_causal": True}, "non-causal.*: use_non_causal is True"),
    ({"use_batch_invariant": True}, "batch invariance.*: use_batch_invariant is True"), ({"use_dcp": True, "has_sliding_window": True}, "has_sliding_window=True is not covered with DCP"),
    ({"use_pcp": True}, "PCP.*: use_pcp is True"), ({"use_rswa": True}, "R-SWA.*: use_rswa is True"),
    ({"use_adaptive_verification": True}, "adaptive verification: use_adaptive_verification is True")])
def test_what_is_refused_when_an_engine_starts(change, reason):
    reasons = AttuneBackend.validate_configuration(**{**ASKED, **change})
    assert re.search(reason, reasons[0]), reasons
    assert reasons[-1].startswith("nearest backend that takes it: ")


def test_the_nearest_backend():
    assert AttuneBackend.validate_configuration(**{**ASKED, "head_size": 600})[-1].endswith("TRITON_ATTN")
    assert AttuneBackend.validate_configuration(**{**ASKED, "dtype": torch.float64})[-1].endswith("none of vLLM here")
    for latent in ({"use_mla": True}, {"use_mla": True, "use_sparse": True}):  # which are sent to each other
        there = integration.backend_name() == "ATTUNE"
        name = "ATTUNE_MLA_SPARSE" if "use_sparse" in latent else "ATTUNE_MLA"
        reasons = AttuneBackend.validate_configuration(**{**ASKED, **latent, "head_size": 576})
        assert reasons[-1].endswith(f": {name}") == there, reasons


def test_the_selector_takes_it_by_name(monkeypatch):
    for compiled in ("vllm._C", "vllm._C_stable_libtorch"):
        monkeypatch.setitem(sys.modules, compiled, types.ModuleType(compiled))
    cuda = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    monkeypatch.setattr(cuda, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)))
    asked = {name: value for name, value in ASKED.items() if name != "device_capability"}
    ours = AttentionBackendEnum[integration.backend_name()]
    assert cuda.get_attn_backend_cls(ours, AttentionSelectorConfig(**asked)) == "attune.integrations.vllm.backend.AttuneBackend"
    with pytest.raises(ValueError, match="is not valid for.*head_size=600.*nearest backend that takes it"):
        cuda.get_attn_backend_cls(ours, AttentionSelectorConfig(**{**asked, "head_size": 600}))


@pytest.mark.parametrize("options, reason", [
    ({"attn_type": "encoder_only"}, "attn_type='encoder_only' is not covered"), ({"chunk_size": 8}, "chunk_size=8 is not covered"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype='nvfp4' is not covered"),
    ({"head_size": 600}, "no kernel of Attune on the CPU takes num_heads=8.*head_size=600.*it must be 1..576"),
    ({"num_kv_heads": 3}, "num_heads=8, num_kv_heads=3.*num_heads_q")])
def test_what_a_layer_refuses_when_it_is_made(options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        AttuneImpl(**{"num_heads": 8, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, **options})


def test_what_a_cache_refuses():
    with pytest.raises(NotImplementedError, match="head_size_v=16 is not covered beside head_size=32.*DIFFKV"):
        Engine([{"head_size_v": 16}])


def test_what_the_builder_refuses():
    engine = Engine([{}])
    engine.step({"a": 1})
    for field, value in (("causal", False), ("causal", torch.ones(1, dtype=torch.int32)), ("mm_req_doc_ranges", {0: [(0, 3)]}),
                         ("rswa_prefix_lens", torch.ones(1))):
        common = CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, 1]), query_start_loc_cpu=torch.tensor([0, 1]), seq_lens=torch.tensor([1]), num_reqs=1,
            num_actual_tokens=1, max_query_len=1, max_seq_len=1, block_table_tensor=torch.zeros(1, 1), slot_mapping=torch.zeros(1),
            **{field: value})
        with pytest.raises(NotImplementedError, match=f"ATTUNE: {field} is"):
            engine.builder.build(0, common)


def test_unknown_versions_are_named(monkeypatch):
    assert integration.unknown_version() is None
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    assert AttuneBackend.validate_configuration(**ASKED)[0] == "vLLM 0.99.1 is not known to Attune: known are 0.31, 0.32, 0.33"


def test_a_version_without_the_registry_goes_on_without_us(monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", "0.9.1")
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    integration.register()
    assert "vLLM 0.9.1 is not known to Attune: known are 0.31, 0.32, 0.33; Attune's backends are not offered" in caplog.text


@pytest.mark.parametrize("ours", [AttuneBackend, AttuneImpl, AttuneMetadataBuilder])
def test_signatures_are_those_of_the_interface(ours):
    assert not ours.__abstractmethods__
    base = next(cls for cls in ours.__mro__ if cls.__module__ == "vllm.v1.attention.backend")
    for name, function in inspect.getmembers(ours, inspect.isroutine):
        if name not in vars(ours) or not hasattr(base, name) or name in ("validate_configuration",):
            continue
        parameters = list(inspect.signature(function).parameters)
        wanted = list(inspect.signature(getattr(base, name)).parameters)
        assert parameters[: len(wanted)] == wanted, name


def test_the_entry_point():
    try:
        importlib.metadata.distribution("attune")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("attune is not installed as a package: vLLM cannot find it by its entry point")
    found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert found["attune"] == "attune.integrations.vllm:register"
    load_general_plugins()
    assert AttentionBackendEnum[integration.backend_name()].get_class() is AttuneBackend
