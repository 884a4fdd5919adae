# SPDX-License-Identifier: Apache-2.0
"""Speculation under SGLang's own classes: the draft model's steps, its chains and trees; verification of unequal numbers of drafts."""

from __future__ import annotations

import pytest
import torch

import stand_ins  # noqa: F401, I001  before SGLang
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import attune.integrations.sglang as integration
from attune.integrations.sglang.backend import AttuneBackend
from attune.integrations.sglang.draft import AttuneMultiStepDraft
from attune.integrations.sglang.metadata import Draft

from drafting import DraftEngine, Drafting, DraftGraph
from engine import CONTEXT_LEN, Engine, publish
from graphs import Graph, RecordedPlan, recorded  # noqa: F401
from contract_mla import MlaEngine

SINKS = torch.linspace(-1, 2, 4)
LAYERS = [{}, {"logit_cap": 3.0}, {"sinks": SINKS}]


class MlaDraftEngine(Drafting, MlaEngine):
    pass


# --------------------------------------------------------------------------------------------------------- the draft model


@pytest.mark.parametrize("page_size, steps", [(1, 2), (4, 5), (16, 3)])
def test_chains(page_size, steps):
    engine = DraftEngine([*LAYERS, {"sliding_window_size": 6}], page_size=page_size, steps=steps)
    engine.run({"a": 20, "b": 3, "c": 9})
    engine.round("a", "b", "c")
    engine.round("c", "a")
    engine.run({"d": 5})
    engine.round("d", "b", accepted=steps + 1)


@pytest.mark.parametrize("topk, steps", [(2, 2), (3, 4), (8, 3)])
def test_trees(topk, steps):
    engine = DraftEngine(LAYERS, topk=topk, steps=steps)
    engine.run({"a": 20, "b": 3, "c": 9})
    engine.round("a", "b", "c")
    engine.round("c", "a", accepted=1)


def test_branches_of_a_tree():
    seen = Draft(step=1, topk=3, num_steps=4).tree().int().tolist()
    assert seen == [[1, 1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]]


def test_a_pool_for_windows():
    engine = DraftEngine([{"sliding_window_size": 6}, {}], page_size=4, window_layers=(0,))
    engine.run({"a": 20, "b": 3})
    engine.round("b", "a")
    engine.drafts_by.init_cuda_graph_state(4, 4)
    DraftGraph(engine, 4).replay("a", "b")


@pytest.mark.parametrize("topk, page_size", [(1, 16), (2, 1)])
def test_latents(topk, page_size):
    engine = MlaDraftEngine(1, topk=topk, steps=3, page_size=page_size)
    engine.run_prompt({"a": 11, "b": 3})
    engine.round("a", "b")
    engine.drafts_by.init_cuda_graph_state(3, 3 * topk)
    DraftGraph(engine, 3).replay("b", "a")


@pytest.mark.parametrize("topk, page_size", [(1, 1), (1, 16), (3, 1)])
def test_graphs(topk, page_size):
    """Lengths, pages, slots and padding change between replays; graphs of other sizes and eager steps run between them."""
    engine = DraftEngine(LAYERS, topk=topk, page_size=page_size)
    engine.drafts_by.init_cuda_graph_state(4, 4 * topk)
    large, small = DraftGraph(engine, 4), DraftGraph(engine, 2)
    tables = {metadata.step.block_table.data_ptr() for of_size in engine.drafts_by._graphs.values() for metadata in of_size}
    assert len(tables) == 1  # of all steps and sizes, as they are large
    engine.run({"a": 20, "b": 3, "c": 31})
    large.replay("a", "b", "c")
    small.replay("c")
    engine.round("b", "a")
    large.replay("b", "c", "a")
    small.replay("b", "c")
    engine.drafts_by.init_cuda_graph_state(2, 2 * topk)
    assert not engine.drafts_by._graphs


@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs_of_verified_tokens(page_size):
    """As --enable-multi-layer-eagle captures them, whose layers draft in this mode alone."""
    engine = DraftEngine([{}, {"sliding_window_size": 6}], page_size=page_size)
    assert engine.backend.draft_extend_metadata_captured_in_graph()
    engine.backend.init_cuda_graph_state(4, 4 * engine.drafts)
    large, small = (Graph(engine, requests, mode=ForwardMode.DRAFT_EXTEND_V2) for requests in (4, 2))
    engine.run({"a": 20, "b": 3, "c": 31})
    large.replay({"a": 5, "b": 5, "c": 5})
    engine.lengths["a"] -= 3
    small.replay({"a": 5})
    engine.run({"b": 5, "a": 5}, mode=ForwardMode.DRAFT_EXTEND_V2)


def test_steps_share_plans_and_a_table(monkeypatch):
    made, gathered = [], []

    def count(into, function):
        return lambda *args, **options: (into.append(options), function(*args, **options))[1]

    monkeypatch.setattr(RecordedPlan, "__init__", count(made, RecordedPlan.__init__))
    monkeypatch.setattr(torch, "index_select", count(gathered, torch.index_select))
    engine = DraftEngine([{}, {}], steps=4)
    engine.run({"a": 20})
    made.clear(), gathered.clear()
    engine.draft("a")
    assert len([fields for fields in made if "workspace" in fields]) == 1 and len(gathered) == 1
    engine.draft("a")
    assert len([fields for fields in made if "workspace" in fields]) == 1


def test_lengths_are_not_read_on_the_host(monkeypatch):
    assert AttuneMultiStepDraft.needs_cpu_seq_lens is False
    engine = DraftEngine([{}], topk=2)
    engine.run({"a": 5})
    batch = engine.draft_batch(["a"])
    for function in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, function, lambda *_: pytest.fail("waits for the device"))
    engine.drafts_by.init_forward_metadata(batch)


def test_what_the_factory_makes():
    engine = DraftEngine([{}], steps=3)
    assert type(engine.drafts_by) is AttuneMultiStepDraft and type(engine.backend) is AttuneBackend and engine.backend.verify_mask is None
    for backend in (engine.drafts_by, engine.backend, *engine.drafts_by.attn_backends):
        assert (backend.prefill_attention_backend_str, backend.decode_attention_backend_str) == ("attune", "attune")
    assert len(engine.drafts_by.attn_backends) == 2
    for name in ("token_to_kv_pool", "req_to_token_pool", "kv_index_translator"):
        assert getattr(engine.drafts_by, name) is getattr(engine.runner, name)
    assert DraftBackendFactory(engine.runner, 1, 1).create_decode_backend() is None


def test_other_backends_of_draft_models_are_as_they_were():
    engine = DraftEngine([{}])
    engine.runner.draft_attention_backend = "fa3"
    factory, other = DraftBackendFactory(engine.runner, 1, 3), Engine([{}]).backend
    made = factory._create_backend("prefill_attention_backend", {"fa3": lambda: ("fa3", other)}, "{backend_type}")
    assert made is other and made.decode_attention_backend_str == "fa3"
    engine.runner.draft_attention_backend = "none"
    with pytest.raises(ValueError, match="EAGLE is not supported in decode attention backend none"):
        factory.__class__(engine.runner, 1, 3).create_decode_backend()


@pytest.mark.parametrize("fields, options, reason", [
    ({"speculative_draft_window_size": 64}, {}, "speculative_draft_window_size=64 .*: triton"),
    ({"speculative_draft_window_size": 64}, {"sliding_window_size": 64}, None),
    ({}, {"topk": 2, "page_size": 4}, "speculative_eagle_topk=2 .*: fa3 .or --page-size 1"),
    ({}, {"topk": 2, "layer": {"sliding_window_size": 6}}, "speculative_eagle_topk=2 .*: triton .or 1"),
    ({}, {"spec_algorithm": SpeculativeAlgorithm.DSPARK}, "speculative_draft_attention_backend='attune' .*: flashinfer")])
def test_draft_models_that_are_refused(fields, options, reason, monkeypatch):
    monkeypatch.setattr("engine.publish", lambda **given: publish(**given, **fields))
    layer = options.pop("layer", {})
    if reason is None:
        DraftEngine([layer], **options)
        return
    with pytest.raises(NotImplementedError, match=f"attune: {reason}"):
        DraftEngine([layer], **options)


def test_versions_that_are_not_known_get_no_hook(monkeypatch):
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *args: registered.append(args))
    monkeypatch.setitem(ATTENTION_BACKENDS, "attune", None)
    for version, expected in (("0.5.99", 0), ("0.5.23", 1)):
        monkeypatch.setattr("sglang.version.__version__", version)
        choices.ATTENTION_BACKEND_CHOICES.remove("attune")
        integration.register()
        assert len(registered) == expected
        integration.register()
        assert len(registered) == expected and choices.ATTENTION_BACKEND_CHOICES.count("attune") == 1


# ----------------------------------------------------------------------------------------------------- the target verifies


def ragged(engine, queries):
    """Unequal numbers of drafts, in as many rows as a batch has that SGLang could replay."""
    rows = engine.verify_input(len(queries), list(queries.values())).ragged_verify_layout.graph_num_tokens
    engine.run(queries, mode=ForwardMode.TARGET_VERIFY, pad_rows=rows - sum(queries.values()), counted=False)


@pytest.mark.parametrize("page_size", [1, 16])
def test_unequal_numbers_of_drafts(page_size):
    engine = Engine([{}, {"sliding_window_size": 6}], drafts=5, algorithm="DSPARK", page_size=page_size)
    engine.run({"a": 20, "b": 3, "c": 9})
    ragged(engine, {"a": 1, "b": 5, "c": 3})
    engine.lengths["b"] -= 3
    ragged(engine, {"c": 2, "b": 2})
    engine.algorithm = "EAGLE"  # as DSPARK where it is not SGLANG_RAGGED_VERIFY_MODE=compact
    engine.run({"c": 5, "a": 5}, mode=ForwardMode.TARGET_VERIFY)


def test_graphs_of_unequal_numbers_of_drafts():
    engine = Engine([{}, {"logit_cap": 3.0}], drafts=5, algorithm="DSPARK", page_size=4)
    assert engine.backend.supports_ragged_verify_graph
    engine.backend.init_cuda_graph_state(4, 16)
    large, small = Graph(engine, 4, tier=16), Graph(engine, 4, tier=8)  # of as many requests
    engine.run({"a": 20, "b": 3, "c": 31})
    large.replay({"a": 5, "b": 1, "c": 4})
    small.replay({"c": 1, "b": 5})
    large.replay({"b": 5, "a": 2, "c": 5})
    ragged(engine, {"a": 3, "c": 1})
    small.replay({"a": 3, "b": 1, "c": 2})


def test_latents_of_unequal_numbers_of_drafts():
    engine = MlaEngine(1, drafts=4, algorithm="DSPARK")
    engine.run_prompt({"a": 11, "b": 3})
    ragged(engine, {"a": 1, "b": 4})


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_algorithms_whose_chains_are_verified(algorithm):
    runner = Engine([{}], drafts=4).runner
    runner.spec_algorithm = SpeculativeAlgorithm.from_string(algorithm)
    assert not integration.create(runner).trees


def test_longest_requests_have_room_for_drafts():
    """Rows of SGLang's table of tokens are longer than what a request may have, for what is drafted behind it."""
    for drafts, longest in ((4, CONTEXT_LEN), (0, CONTEXT_LEN - 6)):
        runner = Engine([{}], drafts=drafts).runner
        runner.model_config.context_len = CONTEXT_LEN - 6
        assert integration.create(runner).tables.max_seq_len == longest
