# SPDX-License-Identifier: Apache-2.0
"""Attention of a draft model: the steps in which it decodes, one after another, before the target verifies what they drafted.

SGLang makes these backends by DraftBackendFactory, whose lists of names are closed; its HookRegistry is what it has for plug-ins to add
to them.
"""

from __future__ import annotations

from typing import Any

from . import NAME, coverage, create
from .backend import AttuneBackend
from .metadata import Draft, Metadata


def offer(factory: Any, backend_name: str, backend_map: dict[str, Any], error_template: str, stamps_children: bool = False) -> None:
    """Before DraftBackendFactory._create_backend: adds Attune to the names it looks up. stamps_children: for the steps of decode, else
    for the forward that puts verified tokens into the draft model's cache."""
    runner = factory.draft_model_runner
    if stamps_children:
        backend_map[NAME] = lambda: (NAME, AttuneMultiStepDraft(runner, factory.topk, factory.speculative_num_steps))
    else:
        backend_map[NAME] = lambda: (NAME, create(runner))


class AttuneMultiStepDraft:
    """What SGLang's workers call once for all steps, and a backend for each step but the last, which only samples."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        """topk: branches of a request. Raises NotImplementedError, by the name of the field, for what is not covered."""
        coverage.check_draft(model_runner, topk)
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.attn_backends: list[AttuneBackend] = [create(model_runner) for _ in range(speculative_num_steps - 1)]
        self._tables = self.attn_backends[0].tables
        self._buffers: Metadata | None = None
        self._graphs: dict[int, list[Metadata]] = {}  # by requests

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a batch that runs without a graph: seq_lens [batch_size] without drafted tokens; out_cache_loc
        [batch_size * topk * speculative_num_steps]."""
        self._use(self._made(forward_batch.batch_size))
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """max_bs requests, of topk tokens each in a step."""
        self._buffers = self._tables.empty(max_bs, max_num_tokens, 1, None)
        self._graphs.clear()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """As AttuneBackend's: a captured graph fills its metadata itself."""
        requests = forward_batch.batch_size
        if in_capture:
            self._graphs[requests] = self._made(requests, self._buffers)
        self._use(self._graphs[requests])

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

    def _made(self, requests: int, buffers: Metadata | None = None) -> list[Metadata]:
        made: list[Metadata] = []
        for step in range(len(self.attn_backends)):
            draft = Draft(step, self.topk, self.speculative_num_steps)
            made.append(self._tables.drafted(requests, draft, buffers, made[0] if made else None))
        return made

    def _use(self, metadata: list[Metadata]) -> None:
        for backend, of_step in zip(self.attn_backends, metadata):
            backend.forward_metadata = of_step
