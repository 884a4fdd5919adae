# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on the CPU: what SGLang's DecodeCudaGraphRunner calls to capture and to replay, in its order. A capture records every
operation of torch and every run of a plan; a replay repeats exactly those, on the tensors that they were given."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner, build_replay_fb_view
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from torch.utils._python_dispatch import TorchDispatchMode

import attune
from attune.integrations import _plans
from engine import TIERS


class Nothing(TorchDispatchMode):
    """Fails where anything is computed."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} ran on the host's side of a replay")


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), "waits for the device"
        result = function(*args, **(kwargs or {}))
        aliases = any(made.alias_info is not None for made in function._schema.returns)
        writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in function._schema.arguments)
        if writes or not aliases:
            self.operations.append((function, args, kwargs or {}, None if writes else result))
        return result

    def replay(self):
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            if result is not None:
                result.copy_(again)


class RecordedPlan(attune.Plan):
    tape = None

    def run(self, **changes):
        return self._record(super().run, changes)

    def run_scheduled(self, **changes):
        return self._record(super().run_scheduled, changes)

    def _record(self, function, changes):
        if RecordedPlan.tape is not None:
            kept = {name: copy.copy(value) if isinstance(value, attune.KVCache) else value for name, value in changes.items()}
            RecordedPlan.tape.operations.append((function, (), kept, None))
        return function(**changes)

    def __init__(self, **fields):
        assert RecordedPlan.tape is None, "a plan was made, and memory allocated, while a graph was captured"
        super().__init__(**fields)


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Plans of tests that import it can be recorded."""
    torch.manual_seed(0)
    monkeypatch.setattr(_plans.attune, "Plan", RecordedPlan)
    monkeypatch.setattr(RecordedPlan, "tape", None)


def record(run_once, after_warmup):
    """As the runner's backend captures it: -> the tape, what the last run returned."""
    for _ in range(2):
        run_once()
        after_warmup()
    tape = RecordedPlan.tape = Tape()
    with tape:
        outputs = run_once()
    RecordedPlan.tape = None
    return tape, outputs


class Graph:
    """Of a number of requests; decode, the verification of drafted tokens, or another mode of as many tokens. tier: rows, where requests
    have unequal numbers of drafts."""

    def __init__(self, engine, requests, tier=None, mode=None):
        assert _plans.attune.Plan is RecordedPlan, "use the fixture"
        self.engine, self.requests = engine, requests
        self.mode = mode or (ForwardMode.TARGET_VERIFY if engine.drafts else ForwardMode.DECODE)
        backend = engine.backend
        tokens = self.rows = tier or requests * (engine.drafts or 1)
        self.runner = SimpleNamespace(
            ragged_verify_mode=tier is not None, _captured_ragged_layouts={}, _ragged_capture_slots=lambda rows: requests,
            captured_req_width=engine.drafts, capture_num_tokens=TIERS, device="cpu")
        layout = DecodeCudaGraphRunner._capture_ragged_verify_layout(self.runner, tokens)
        fill = backend.get_cuda_graph_seq_len_fill_value()
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(tokens, dtype=torch.int64), positions=torch.zeros(tokens, dtype=torch.int64),
            req_pool_indices=torch.zeros(requests, dtype=torch.int64), seq_lens=torch.full((requests,), fill, dtype=torch.int64),
            seq_lens_cpu=None, out_cache_loc=torch.zeros(tokens, dtype=torch.int64), mamba_track_indices=None, encoder_lens=None)
        self.inputs = [tuple(x.contiguous() for x in engine.inputs(tokens)) for _ in engine.layers]
        batch = ForwardBatch(
            forward_mode=self.mode, batch_size=requests, input_ids=self.buffers.input_ids,
            seq_lens=self.buffers.seq_lens, seq_lens_sum=None, req_pool_indices=self.buffers.req_pool_indices,
            out_cache_loc=self.buffers.out_cache_loc, positions=self.buffers.positions,
            spec_info=(engine.ragged_input(layout) if layout is not None else
                       EagleDraftExtendInput(num_tokens_per_req=engine.drafts) if self.mode.is_draft_extend_v2() else
                       engine.verify_input(requests, requests * [engine.drafts]) if engine.drafts else None))
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)

            def run_once():
                backend.init_forward_metadata_in_graph(batch)
                return [engine.forward(layer, *inputs, batch) for layer, inputs in zip(engine.layers, self.inputs)]

            self.tape, self.outputs = record(run_once, backend.on_after_cuda_graph_warmup)

    def replay(self, queries):
        """A step of queries, which may be fewer requests than were captured; each output is compared."""
        engine, buffers, count = self.engine, self.buffers, len(queries)
        batch = engine.batch(self.mode, queries)
        tokens = sum(queries.values())
        buffers.seq_lens.fill_(engine.backend.get_cuda_graph_seq_len_fill_value())
        for name, rows in (("req_pool_indices", count), ("seq_lens", count), ("out_cache_loc", tokens)):
            into = getattr(buffers, name)
            if name != "seq_lens":
                into.zero_()
            into[:rows] = getattr(batch, name)
        if self.runner.ragged_verify_mode:
            layout = batch.spec_info.ragged_verify_layout
            assert layout.graph_num_tokens == self.rows
            DecodeCudaGraphRunner._stage_ragged_verify_layout(self.runner, layout, self.rows)
        view = build_replay_fb_view(
            forward_batch=batch, buffers=buffers, bs=self.requests, raw_bs=count, num_tokens=self.rows,
            global_num_tokens_cpu=None, seq_len_fill_value=1, capture_forward_mode=self.mode, is_encoder_decoder=False)
        with Nothing():
            engine.backend.init_forward_metadata_out_graph(view)
        assert engine.backend.forward_metadata.step.num_tokens == self.rows
        for layer, inputs in zip(engine.layers, self.inputs):
            for static, new in zip(inputs, engine.inputs(len(inputs[0]))):
                static.copy_(new)
            engine.remember(layer, queries, *(x[:tokens] for x in inputs[1:]))
        self.tape.replay()
        for layer, inputs, out in zip(engine.layers, self.inputs, self.outputs):
            engine.check(layer, queries, inputs[0][:tokens], out[:tokens])
