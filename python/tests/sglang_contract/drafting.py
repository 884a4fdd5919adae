# SPDX-License-Identifier: Apache-2.0
"""A draft model, as SGLang's EagleDraftWorker has it: its backends come from DraftBackendFactory, its steps run as draft_forward and
EAGLEDraftCudaGraphRunner run them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

import attune.integrations.sglang as integration
from compare import assert_attention, dtype_name

integration.register()
HookRegistry.apply_hooks()  # as load_plugins does behind all of them

from engine import Engine, attention  # noqa: E402
from graphs import Nothing, record  # noqa: E402


class Drafting:
    """Of an Engine, which it makes one of a draft model. steps: --speculative-num-steps."""

    def __init__(self, layers, *, steps=4, topk=1, **options):
        super().__init__(layers, drafts=steps + 1, topk=topk, is_draft_worker=True, **options)
        self.steps = steps
        factory = DraftBackendFactory(self.runner, topk, steps)
        self.drafts_by = factory.create_decode_backend()
        self.backend = factory.create_draft_extend_backend()  # which SGLang puts in the place of the runner's own

    def draft_batch(self, requests):
        """As prepare_for_draft makes it: a request's row has topk places after another, of num_steps tokens each."""
        count = len(requests)
        before = torch.tensor([self.lengths[request] for request in requests])
        where = torch.cat([self.slots(request, self.lengths[request], self.lengths[request] + self.topk * self.steps)
                           for request in requests])
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=count, input_ids=None, out_cache_loc=where, seq_lens=before,
            req_pool_indices=torch.tensor([self.rows[request] for request in requests]), seq_lens_sum=None, seq_lens_cpu=None,
            positions=before.repeat_interleave(self.topk), spec_info=EagleDraftInput(num_tokens_per_req=self.topk))

    def draft_forward(self, batch, inputs):
        """inputs: of each step and layer -> outputs of each step and layer."""
        slots, outputs = batch.out_cache_loc, []
        for step in range(self.steps - 1):
            batch.out_cache_loc = per_step_draft_out_cache_loc(slots, batch.batch_size, self.topk, self.steps)[step]
            backend = self.drafts_by.attn_backends[step]
            outputs.append([self.forward(layer, *of_layer, batch, backend=backend)
                            for layer, of_layer in zip(self.layers, inputs[step])])
        batch.out_cache_loc = slots
        return outputs

    def draft(self, *requests):
        """The steps behind what is in the cache, which is as it was afterwards."""
        batch = self.draft_batch(requests)
        self.drafts_by.init_forward_metadata(batch)
        inputs = [[self.inputs(len(requests) * self.topk) for _ in self.layers] for _ in range(self.steps - 1)]
        self.check_drafts(requests, inputs, self.draft_forward(batch, inputs))

    def check_drafts(self, requests, inputs, outputs):
        for i, layer in enumerate(self.layers):
            options = self.options[layer.layer_id]
            sinks = options.get("sinks")
            fields = {"scale": options.get("scaling", self.d**-0.5), "window_left": options.get("sliding_window_size", -1),
                      "softcap": options.get("logit_cap"), "sinks": None if sinks is None else sinks.double().numpy()}
            for row, (request, branch) in enumerate((request, branch) for request in requests for branch in range(self.topk)):
                k, v = self.given[request, layer.layer_id]
                k, v = k[: self.lengths[request]], v[: self.lengths[request]]
                for step in range(self.steps - 1):
                    q, new_k, new_v = (x[row].view(1, -1, d).double() for x, d in zip(inputs[step][i], (self.d, self.d, self.d_v)))
                    k, v = torch.cat([k, new_k]), torch.cat([v, new_v])
                    expected = attention(q.numpy(), k.numpy(), v.numpy(), **fields)
                    out = outputs[step][i][row].view(1, self.heads, self.d_v)
                    assert_attention(out.float().numpy(), None, None, expected, dtype_name(out))

    def round(self, *requests, accepted=2):
        """Drafts; then what the target accepts goes to the draft model's cache."""
        self.draft(*requests)
        self.run(dict.fromkeys(requests, self.drafts), mode=ForwardMode.DRAFT_EXTEND_V2)
        for request in requests:
            self.lengths[request] -= self.drafts - accepted


class DraftGraph:
    """Of a number of requests; all steps in one graph."""

    def __init__(self, engine, requests):
        self.engine, self.requests = engine, requests
        backend, rows = engine.drafts_by, requests * engine.topk
        fill = backend.attn_backends[0].get_cuda_graph_seq_len_fill_value()
        self.buffers = {"req_pool_indices": torch.zeros(requests, dtype=torch.int64), "positions": torch.zeros(rows, dtype=torch.int64),
                        "seq_lens": torch.full((requests,), fill, dtype=torch.int64),
                        "out_cache_loc": torch.zeros(rows * engine.steps, dtype=torch.int64)}
        self.inputs = [[tuple(x.contiguous() for x in engine.inputs(rows)) for _ in engine.layers] for _ in range(engine.steps - 1)]
        batch = ForwardBatch(forward_mode=ForwardMode.DECODE, batch_size=requests, input_ids=None, seq_lens_sum=None,
                             spec_info=EagleDraftInput(num_tokens_per_req=engine.topk), **self.buffers)
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)

            def run_once():
                backend.init_forward_metadata_in_graph(batch)
                return engine.draft_forward(batch, self.inputs)

            self.tape, self.outputs = record(run_once, lambda: None)

    def replay(self, *requests):
        """Steps of requests, which may be fewer than were captured; each output is compared."""
        engine, count = self.engine, len(requests)
        batch = engine.draft_batch(requests)
        for name, buffer in self.buffers.items():
            buffer.fill_(engine.drafts_by.attn_backends[0].get_cuda_graph_seq_len_fill_value() if name == "seq_lens" else 0)
            given = getattr(batch, name)
            buffer[: len(given)] = given
            setattr(batch, name, buffer)
        batch.batch_size = self.requests
        with Nothing():
            engine.drafts_by.init_forward_metadata_out_graph(SimpleNamespace(**vars(batch), num_padding=self.requests - count))
        for of_step in self.inputs:
            for of_layer in of_step:
                for static, new in zip(of_layer, engine.inputs(len(of_layer[0]))):
                    static.copy_(new)
        self.tape.replay()
        engine.check_drafts(requests, self.inputs, self.outputs)


class DraftEngine(Drafting, Engine):
    pass
