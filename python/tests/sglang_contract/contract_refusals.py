# SPDX-License-Identifier: Apache-2.0
"""What is refused, by its name, and what SGLang asks of a backend's class. As contract.py, under SGLang's own classes."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import stand_ins  # noqa: F401, I001  before SGLang
from sglang.srt.arg_groups import choices
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import attune.integrations.sglang as integration
from attune.integrations.sglang import coverage
from attune.integrations.sglang.backend import AttuneBackend
from attune.integrations.sglang.mla import AttuneMLABackend

integration.register()
integration.register()  # each process may do so more than once

from engine import Engine  # noqa: E402


@pytest.mark.parametrize("change, reason", [
    ({"device": "npu"}, "device='npu' is not covered; nearest .*: torch_native"),
    ({"spec_algorithm": SpeculativeAlgorithm.NGRAM}, "speculative_algorithm='NGRAM' .*: triton"),
    ({"model_config.is_encoder_decoder": True}, "is_encoder_decoder=True .*: flashinfer"),
    ({"kv_index_translator.is_translating": True}, "enable_unified_memory=True .*: triton"),
    ({"token_to_kv_pool.kv_cache_layout": "vectorized_5d"}, "kv_cache_layout='vectorized_5d' .*: aiter"),
    ({"model[0].xai_temperature_len": 512}, "xai_temperature_len=512 .*: triton"),
    ({"token_to_kv_pool.quant_method": SimpleNamespace(name="nvfp4")}, "kv_cache_dtype='nvfp4' .*: flashinfer"),
    ({"token_to_kv_pool.dtype": torch.float64}, "kv_cache_dtype=torch.float64 .*: triton"),
    ({"dtype": torch.float64}, "dtype=torch.float64 .*: triton")])
def test_what_is_refused_when_a_server_starts(change, reason):
    runner = Engine([{}]).runner
    for name, value in change.items():
        where, _, last = f"runner.{name}".rpartition(".")
        setattr(eval(where, {"runner": runner}), last, value)
    with pytest.raises(NotImplementedError, match=f"attune: {reason}"):
        integration.create(runner)


def test_diffusion_models_are_refused():
    runner = Engine([{}]).runner
    with get_exec().dllm.override(dllm_algorithm="LowConfidence"):
        with pytest.raises(NotImplementedError, match="attune: dllm_algorithm='LowConfidence' is not covered.*: flashinfer"):
            integration.create(runner)


@pytest.mark.parametrize("sizes, reason", [
    ({"dcp_enabled": True, "attn_dcp_size": 2}, "dcp_size=2 .*: flashinfer"),
    ({"attn_cp_size": 2, "tp_size": 2, "moe_tp_size": 2}, "attn_cp_size=2 .*: fa3")])
def test_parallelism_that_is_refused(sizes, reason):
    with get_parallel().override(**sizes), pytest.raises(NotImplementedError, match=reason):
        Engine([{}])


@pytest.mark.parametrize("layer, reason", [
    ({"is_cross_attention": True}, "is_cross_attention=True .*: flashinfer"), ({"use_irope": True}, "use_irope=True .*: fa3"),
    ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type=.*encoder_only.*: triton"),
    ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode='ALIBI' .*: flashinfer"),
    ({"logit_cap": 30.0, "logit_capping_method": "other"}, "logit_capping_method='other' .*: triton"),
    ({"num_heads": 3}, "no kernel on the CPU takes num_heads=3, num_kv_heads=2.*num_heads_q.*: triton")])
def test_layers_that_are_refused(layer, reason):
    with pytest.raises(NotImplementedError, match=f"attune: {reason}"):
        Engine([{}, layer])


def test_trees_that_no_kernel_takes(monkeypatch):
    """MLA's on GPUs whose kernel has no mask_bits."""
    monkeypatch.setattr(coverage, "capability_of", lambda device: (9, 0))
    Engine([{}], dtype=torch.bfloat16, drafts=4, topk=4)
    monkeypatch.setattr(coverage, "why_not", lambda capability, call: "no bits" if "mask_bits" in call else None)
    Engine([{}], drafts=4)
    with pytest.raises(NotImplementedError, match="speculative_eagle_topk > 1: no bits; nearest.*: triton"):
        Engine([{}], drafts=4, topk=4)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_gpus_that_the_registry_has_kernels_for(capability, monkeypatch):
    monkeypatch.setattr(coverage, "capability_of", lambda device: capability)
    Engine([{}], dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"no kernel on a GPU of compute capability {}\.{} takes.*head_dim=300".format(*capability)):
        Engine([{}], dtype=torch.bfloat16, d=300)


def test_gpus_that_are_too_old(monkeypatch):
    monkeypatch.setattr(coverage, "capability_of", lambda device: (7, 5))
    with pytest.raises(NotImplementedError, match="no kernel on a GPU of compute capability 7.5 takes.*the kernels need 8.0.*: triton"):
        Engine([{}], dtype=torch.bfloat16)


def test_heads_that_no_kernel_takes():
    with pytest.raises(NotImplementedError, match="no kernel on the CPU takes.*head_dim=600.*1..576.*: triton"):
        Engine([{}], d=600)


@pytest.mark.parametrize("argument", ["topk_indices", "score_mod", "return_lse"])
def test_arguments_that_are_refused(argument):
    engine = Engine([{}])
    batch = engine.batch(ForwardMode.EXTEND, {"a": 5})
    engine.backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=f"attune: {argument}='given' is not covered"):
        engine.forward(engine.layers[0], *engine.inputs(5), batch, **{argument: torch.ones(5)})


@pytest.mark.parametrize("mode", [ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DLLM_EXTEND, ForwardMode.SPLIT_PREFILL])
def test_modes_that_are_refused(mode):
    engine = Engine([{}])
    with pytest.raises(NotImplementedError, match=f"attune: forward_mode='{mode.name}' is not covered"):
        engine.backend.init_forward_metadata(SimpleNamespace(forward_mode=mode, batch_size=1))


def test_pools_that_are_refused(monkeypatch):
    class MHATokenToKVPoolFP4(memory_pool.MHATokenToKVPool):
        pass

    monkeypatch.setattr("engine.MHATokenToKVPool", MHATokenToKVPoolFP4)
    with pytest.raises(NotImplementedError, match="token_to_kv_pool='MHATokenToKVPoolFP4' is not covered.*: flashinfer"):
        Engine([{}])


def test_unknown_versions_are_named(monkeypatch):
    assert integration.unknown_version() is None
    monkeypatch.setattr("sglang.version.__version__", "0.5.22.post1")
    assert integration.unknown_version() is None
    monkeypatch.setattr("sglang.version.__version__", "0.5.99.post1")
    with pytest.raises(NotImplementedError, match="SGLang 0.5.99.post1 is not known to Attune: known are 0.5.22, 0.5.23"):
        Engine([{}])


def test_a_version_without_the_registry_goes_on_without_us(monkeypatch, caplog):
    monkeypatch.setattr("sglang.version.__version__", "0.4.6")
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.attention_registry", None)
    integration.register()
    assert re.search("SGLang 0.4.6 is not known to Attune: known are .*; Attune's backend is not offered", caplog.text)


def test_it_is_offered():
    assert choices.ATTENTION_BACKEND_CHOICES.count("attune") == 1
    assert "attune" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES + choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert "attune" not in choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    assert ATTENTION_BACKENDS["attune"] is integration.create
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert parser.parse_args(["--model-path", "model", "--attention-backend", "attune"]).attention_backend == "attune"


def test_the_entry_point(monkeypatch):
    try:
        importlib.metadata.distribution("attune")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("attune is not installed as a package: SGLang cannot find it by its entry point")
    from sglang.srt import plugins

    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.delitem(ATTENTION_BACKENDS, "attune")
    plugins.load_plugins()
    assert ATTENTION_BACKENDS["attune"] is integration.create


# What SGLang leaves to a backend.
ANSWERED = {"forward_extend", "forward_decode", "init_forward_metadata", "init_forward_metadata_out_graph",
            "init_forward_metadata_in_graph", "init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value",
            "draft_extend_metadata_captured_in_graph"}


@pytest.mark.parametrize("ours", [AttuneBackend, AttuneMLABackend])
def test_signatures_are_those_of_the_interface(ours):
    assert issubclass(ours, AttentionBackend) and not ours.__abstractmethods__
    for name in ANSWERED:
        assert getattr(ours, name) is not getattr(AttentionBackend, name), name
        wanted = inspect.signature(getattr(AttentionBackend, name)).parameters
        has = inspect.signature(getattr(ours, name)).parameters
        assert list(has)[: len(wanted)] == list(wanted) or list(has)[: len(wanted) - 1] == list(wanted)[:-1], name
        assert all(has[parameter].default == wanted[parameter].default for parameter in wanted), name


def test_flags():
    """Those that are left as they are say what is so: no graph of prompts, no metadata glued into a graph."""
    engine = Engine([{}])
    backend = engine.backend
    assert backend.supports_ragged_verify_graph and not backend.supports_full_cuda_graph_chunked_prefix
    assert not backend.use_captured_forward_metadata_for_breakable_cuda_graph and backend.verify_mask is None
    assert backend.shared_read_ends(ForwardMode.DECODE) == SharedReadEnds.IN_REPLAY
    assert backend.shared_read_ends(ForwardMode.EXTEND) == SharedReadEnds.UNKNOWN
    assert backend.attn_backend_list is None and backend.get_indexer_metadata(0, None) is None
    assert (backend.prefill_attention_backend_str, backend.decode_attention_backend_str) == ("attune", "attune")
    for name in ("token_to_kv_pool", "req_to_token_pool"):  # SGLang finds its pools by the backend of the forward
        assert getattr(backend, name) is getattr(engine.runner, name)
