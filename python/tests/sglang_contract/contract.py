# SPDX-License-Identifier: Apache-2.0
"""The dense backend under SGLang's own classes. Run by test_sglang.py, once for each version that was fetched, in its own process."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import stand_ins  # noqa: F401, I001  before SGLang
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode

import attune.integrations.sglang as integration
import reference
from attune.integrations import _plans
from attune.integrations.sglang.backend import AttuneBackend
from attune.integrations.sglang.layers import pages
from attune.integrations.sglang.mla import AttuneMLABackend

integration.register()

from engine import REQUESTS, Engine, attention  # noqa: E402
from graphs import Graph, RecordedPlan, recorded  # noqa: E402, F401


def serve(engine):
    """Prompts, chunks, decode, both in one batch; padded rows."""
    engine.run({"a": 17, "b": 3})
    engine.run({"a": 1, "b": 1})
    engine.run({"b": 1, "a": 1, "c": 9})
    engine.run({"c": 12, "a": 1}, mode=ForwardMode.MIXED)
    engine.run({"c": 1, "b": 1, "a": 1})
    engine.run({"b": 2, "c": 5}, pad_rows=3)
    engine.run({"c": 2, "a": 3}, pad_rows=2, counted=False)


SINKS = torch.linspace(-1, 2, 4)
KINDS = {"plain": {}, "window": {"sliding_window_size": 6}, "softcap": {"logit_cap": 3.0}, "scaling": {"scaling": 0.3},
         "sinks": {"sinks": SINKS}, "gpt_oss": {"sliding_window_size": 15, "sinks": SINKS}}


def test_the_oracle():
    q, k, v, sinks = (np.random.default_rng(0).standard_normal(shape) for shape in ((3, 4, 8), (9, 2, 8), (9, 2, 6), (4,)))
    for fields in ({}, {"window_left": 2}, {"softcap": 0.5, "sinks": sinks}):
        ours = attention(q, k, v, 0.3, **fields)
        other = reference.attention(q, k, v, causal=True, softmax_scale=0.3, cu_seqlens_q=np.int32([0, 3]),
                                    cu_seqlens_kv=np.int32([0, 9]), **fields)
        for name in ("out", "weight"):
            np.testing.assert_allclose(getattr(ours, name), getattr(other, name), rtol=1e-12, atol=1e-12)
        assert (ours.products >= other.products * (1 - 1e-12)).all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_page_sizes(page_size):
    serve(Engine([{}, {}], page_size=page_size))


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "plain"])
def test_kinds_of_layers(kind):
    serve(Engine([KINDS[kind]], page_size=4))


@pytest.mark.parametrize("dtype, heads, heads_kv, d, d_v", [(torch.float16, 8, 8, 64, 64), (torch.bfloat16, 4, 1, 128, 128),
                                                           (torch.bfloat16, 4, 2, 48, 32)])
def test_dtypes_and_heads(dtype, heads, heads_kv, d, d_v):
    serve(Engine([{}], dtype=dtype, heads=heads, heads_kv=heads_kv, d=d, d_v=d_v))


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_of_heads(page_size, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    engine = Engine([{}, {}], page_size=page_size)
    assert engine.pool.get_kv_buffer(0)[0].shape[1] == engine.heads_kv
    serve(engine)


@pytest.mark.parametrize("kv_cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_caches(kv_cache_dtype):
    layers = [{"scales": (0.02, 0.03)}, {"scales": (0.05, 0.01)}, {}]
    serve(Engine(layers, kv_cache_dtype=kv_cache_dtype, dtype=torch.bfloat16, page_size=4))


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_pool_for_windows(page_size):
    engine = Engine([{"sliding_window_size": 6}, {}, {"sliding_window_size": 6}], page_size=page_size, window_layers=(0, 2))
    serve(engine)
    engine.backend.init_cuda_graph_state(4, 4)
    Graph(engine, 4).replay({"c": 1, "a": 1, "b": 1})


def test_layers_between_which_are_others():
    """Models whose other layers are of linear attention: the pool has fewer layers than the model."""
    serve(Engine([{}, KINDS["softcap"]], page_size=4, between=3))


def test_a_window_in_both_pools():
    """They are of one kind, and share plans; their tables differ."""
    serve(Engine([{"sliding_window_size": 6}, {"sliding_window_size": 6}] * 2, page_size=4, window_layers=(0, 3)))


def test_caches_are_not_copied():
    engine = Engine([{}], page_size=4)
    engine.run({"a": 5})
    k, v = engine.pool.get_kv_buffer(0)
    cache = engine.backend._find(engine.layers[0]).cache()
    assert (cache.k.data_ptr(), cache.v.data_ptr()) == (k.data_ptr(), v.data_ptr()) and cache.k.shape[:2] == (120, 4)
    assert pages(k[:11], 4).shape[:2] == (2, 4)  # where slots are left behind the last page


def test_verified_drafts():
    engine = Engine([{}, KINDS["window"]], drafts=4, page_size=4)
    engine.run({"a": 20, "b": 3, "c": 9})
    engine.run({"a": 4, "b": 4, "c": 4}, mode=ForwardMode.TARGET_VERIFY)
    for request in "abc":
        engine.lengths[request] -= 2  # two of the drafts were not accepted
    engine.run({"c": 4, "a": 4}, mode=ForwardMode.TARGET_VERIFY)
    engine.drafts = 2  # of this batch, as its spec_info says
    engine.run({"c": 2, "b": 2}, mode=ForwardMode.TARGET_VERIFY)


def test_trees_of_drafts():
    engine = Engine([{}, KINDS["softcap"], KINDS["window"], {"sinks": SINKS}], drafts=11, topk=3, page_size=4)
    engine.run({"a": 20, "b": 3, "c": 9})
    engine.run({"a": 11, "b": 11, "c": 11}, mode=ForwardMode.TARGET_VERIFY)
    for request in "abc":
        engine.lengths[request] -= 7
    engine.run({"a": 1, "c": 1})
    engine.run({"c": 11, "a": 11}, mode=ForwardMode.TARGET_VERIFY)


def test_trees_that_are_drawn_behind_the_metadata():
    """As by SGLang's stream for plans."""
    engine = Engine([{}], drafts=4, topk=2)
    engine.run({"a": 20})
    batch = engine.batch(ForwardMode.TARGET_VERIFY, {"a": 4})
    engine.backend.init_forward_metadata(batch)
    engine.draw_trees(1)
    engine.backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    q, k, v = engine.inputs(4)
    engine.remember(engine.layers[0], {"a": 4}, k, v)
    engine.check(engine.layers[0], {"a": 4}, q, engine.forward(engine.layers[0], q, k, v, batch))
    engine.backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, 1)  # a graph reads it itself


def test_chains_need_no_mask():
    mask = Engine([{}], drafts=4).backend.verify_mask
    assert not mask.is_read and mask.mode == TreeMaskMode.QLEN_ONLY and mask.fits(REQUESTS)


def test_new_caches_and_scales_are_seen():
    engine = Engine([{"scales": (0.02, 0.03)}], kv_cache_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16)
    engine.run({"a": 5})
    old = engine.pool.k_buffer[0]
    engine.pool.k_buffer[0] = old.clone()
    old.fill_(0xFF)
    engine.run({"a": 1})
    engine.layers[0].k_scale = torch.nn.Parameter(torch.tensor(0.05), requires_grad=False)  # as after an update of the weights
    engine.run({"b": 5})


def test_keys_that_are_not_saved():
    """As of a layer that reads the cache of another."""
    engine = Engine([{}])
    engine.run({"a": 5})
    batch = engine.run({"a": 1})
    q, k, v = engine.inputs(1)
    out = engine.forward(engine.layers[0], q, k, v, batch, save_kv_cache=False)
    engine.check(engine.layers[0], {"a": 1}, q, out)
    assert torch.equal(engine.forward(engine.layers[0], q, None, None, batch), out)


def test_an_output_that_is_given_is_written():
    engine = Engine([{}])
    batch = engine.batch(ForwardMode.EXTEND, {"a": 5})
    engine.backend.init_forward_metadata(batch)
    batch._attn_output = torch.full((5, 128), torch.nan)
    out = engine.forward(engine.layers[0], *engine.inputs(5), batch)
    assert out.data_ptr() == batch._attn_output.data_ptr() and out.isfinite().all()


# ------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("page_size, drafts, topk", [(1, 0, 1), (16, 0, 1), (4, 3, 1), (4, 9, 3)])
def test_graphs(page_size, drafts, topk):
    """Lengths, pages, slots, trees and padding change between replays; graphs of other sizes and eager steps run between them."""
    engine = Engine([{}, KINDS["softcap"], {}, KINDS["window"]], page_size=page_size, drafts=drafts, topk=topk)
    count = drafts or 1
    engine.backend.init_cuda_graph_state(4, 4 * count)
    large, small = Graph(engine, 4), Graph(engine, 2)
    for name in ("block_table", "seq_lens"):  # which may be large
        assert len({getattr(metadata.step, name).data_ptr() for metadata in engine.backend._graphs.values()}) == 1
    engine.run({"a": 20, "b": 3, "c": 31})
    large.replay({"a": count, "b": count, "c": count})
    small.replay({"c": count})
    engine.run({"d": 6, "a": 2})
    large.replay({"d": count, "a": count, "c": count, "b": count})
    small.replay({"b": count, "d": count})
    engine.lengths["a"] = 2
    large.replay({"a": count})
    engine.backend.init_cuda_graph_state(2, 2 * count)  # as where graphs are captured anew
    assert not engine.backend._graphs
    Graph(engine, 2).replay({"b": count, "c": count})


def test_graphs_of_sinks_and_eight_bits():
    engine = Engine([{"sinks": SINKS, "scales": (0.02, 0.03)}, {"scales": (0.04, 0.01)}], kv_cache_dtype=torch.float8_e4m3fn,
                    dtype=torch.bfloat16)
    engine.backend.init_cuda_graph_state(2, 2)
    graph = Graph(engine, 2)
    engine.run({"a": 20, "b": 3})
    graph.replay({"a": 1, "b": 1})


def test_what_a_graph_refuses():
    engine = Engine([{}])
    engine.backend.init_cuda_graph_state(2, 64)
    with pytest.raises(NotImplementedError, match="cuda_graph_backend_prefill='full' is not covered.*breakable"):
        engine.backend.init_forward_metadata_out_graph(engine.batch(ForwardMode.EXTEND, {"a": 5}), in_capture=True)


# ---------------------------------------------------------------------------------------------------- plans, schedules


@pytest.fixture
def calls(monkeypatch):
    made = []

    class Plan(RecordedPlan):
        def __init__(self, **fields):
            made.append(fields)
            super().__init__(**fields)

        def run(self, **changes):
            made.append("run")
            return super().run(**changes)

        def run_scheduled(self, **changes):
            made.append("run_scheduled")
            return super().run_scheduled(**changes)

    monkeypatch.setattr(_plans.attune, "Plan", Plan)
    return made


def test_layers_of_a_kind_share_a_schedule(calls):
    engine = Engine([{}, KINDS["softcap"], {}, KINDS["softcap"], {}])
    engine.run({"a": 20, "b": 3})
    assert [call for call in calls if isinstance(call, str)] == ["run", "run", "run_scheduled", "run_scheduled", "run_scheduled"]
    calls.clear()
    engine.run({"a": 1, "b": 1})
    calls.clear()
    engine.run({"b": 1, "a": 1})
    assert calls == ["run", "run", "run_scheduled", "run_scheduled", "run_scheduled"]  # and no plan is made again


def test_plans_have_room_for_their_steps(calls):
    engine = Engine([{}], drafts=3)
    engine.run({"b": 2, "a": 33, "c": 1})
    engine.run({"a": 1, "b": 1})
    engine.run({"a": 3, "b": 3}, mode=ForwardMode.TARGET_VERIFY)
    prompt, decode, verify = [call for call in calls if "workspace" in call]
    assert prompt["max_seqlen_q"] >= 33 and prompt["q"].shape[0] >= 36 and prompt["cu_seqlens_q"].shape == (5,)
    assert decode["max_seqlen_q"] == 1 and decode["cu_seqlens_q"] is None and decode["seqused_kv"].shape == (2,)
    assert verify["max_seqlen_q"] == 4 and verify["cu_seqlens_q"].shape == (3,)


def test_lengths_are_not_read_on_the_host():
    """Batches of `Engine` have no seq_lens_cpu and no seq_lens_sum: SGLang makes none where no backend needs them."""
    assert AttuneBackend.needs_cpu_seq_lens is False and AttuneMLABackend.needs_cpu_seq_lens is False
    engine = Engine([{}])
    engine.run({"a": 5})
    batch = engine.batch(ForwardMode.DECODE, {"a": 1})
    for function in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__"):
        assert function in dir(torch.Tensor)
    with pytest.MonkeyPatch.context() as patch:
        for function in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, function, lambda *_: pytest.fail("waits for the device"))
        engine.backend.init_forward_metadata(batch)
        engine.forward(engine.layers[0], *engine.inputs(1), batch)


def test_idle_batches():
    engine = Engine([{}])
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    engine.backend.init_forward_metadata(batch)
    assert engine.backend.forward(torch.empty(0, 128), None, None, engine.layers[0], batch).shape == (0, 128)


def test_prompts_by_another_backend():
    engine = Engine([{}], prefill_attention_backend_str="torch_native")
    assert isinstance(engine.backend, HybridAttnBackend) and type(engine.backend.decode_backend) is AttuneBackend
    engine.run({"a": 1, "b": 1}, mode=ForwardMode.DECODE)
    engine.run({"b": 1, "a": 1})
