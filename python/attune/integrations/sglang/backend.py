# SPDX-License-Identifier: Apache-2.0
"""The dense backend, and what it shares with that of MLA: metadata of a batch, eager and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout

from .._plans import Plans
from . import coverage
from .layers import Layer
from .metadata import Metadata, Tables


class AttuneBackend(AttentionBackend):
    needs_cpu_seq_lens: bool = False  # lengths are read on the device
    supports_ragged_verify_graph: bool = True  # offsets are, too

    def __init__(self, model_runner: Any) -> None:
        """Raises NotImplementedError, by the name of the field, for a model or a server that is not covered."""
        super().__init__()
        coverage.check_runner(model_runner)
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.data_type = model_runner.kv_cache_dtype
        self.device = self.req_to_token_pool.req_to_token.device
        self.page_size: int = model_runner.page_size
        self.dtype: torch.dtype = model_runner.dtype
        window = self.token_to_kv_pool if type(self.token_to_kv_pool) is SWAKVPool else None
        self._window_layers = {} if window is None else window.layers_mapping
        self.is_draft: bool = model_runner.is_draft_worker
        self._draft_tokens: int = 0 if self.is_draft else get_spec().speculative_num_draft_tokens or 0  # that are verified
        self.trees = coverage.drafts_are_trees(model_runner)
        self._verify_mask = self._make_verify_mask() if self._draft_tokens else None
        places = self.req_to_token_pool.req_to_token
        longest = places.shape[1] if coverage.drafts(model_runner) else model_runner.model_config.context_len  # drafts lie behind that
        self.tables = Tables(places, self.page_size, window and window.full_to_swa_index_mapping, longest, Plans(self.device))
        self._buffers: Metadata | None = None
        self._graphs: dict[tuple[int, int], Metadata] = {}  # by requests and their queries
        self.forward_metadata: Metadata | None = None

        self._layers: dict[Any, Layer] = {}
        for module in model_runner.model.modules():
            if isinstance(module, RadixAttention):
                self._find(module)

    # -------------------------------------------------------------------------------------------------------- metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a batch that runs without a graph."""
        mode = forward_batch.forward_mode
        requests = forward_batch.batch_size
        if mode.is_idle() or requests == 0:
            self.forward_metadata = None
            return
        if mode.is_decode():
            metadata = self.tables.empty(requests, requests, 1, None)
        elif mode.is_target_verify():
            metadata = self._verified(forward_batch, None)
        elif mode.is_extend_or_draft_extend_or_mixed(include_draft_extend_v2=self.is_draft) and not mode.is_split_prefill():
            starts = torch.zeros(requests + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
            lengths = forward_batch.extend_seq_lens_cpu  # extend_num_tokens counts padding
            metadata = self.tables.empty(requests, sum(lengths), max(lengths), starts)
        else:
            coverage.refuse("forward_mode", mode.name, "triton")
        self.tables.fill(metadata, forward_batch)
        self.forward_metadata = metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._buffers = self.tables.empty(max_bs, max_num_tokens, 1, None)
        self._graphs.clear()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """A captured graph fills its metadata itself: a replay has no work for the host here."""
        mode = forward_batch.forward_mode
        extends_draft = self.is_draft and mode.is_draft_extend_v2()
        if not mode.is_decode_or_idle() and not mode.is_target_verify() and not extends_draft:
            coverage.refuse("cuda_graph_backend_prefill", "full", "fa3 (or --cuda-graph-backend-prefill breakable)")
        requests = forward_batch.batch_size
        key = requests, requests if mode.is_decode_or_idle() else self._rows(forward_batch)
        if in_capture:
            if mode.is_target_verify():
                made = self._verified(forward_batch, self._buffers)
            elif extends_draft:
                length = self._draft_length(forward_batch)
                starts = torch.arange(0, (requests + 1) * length, length, dtype=torch.int32, device=self.device)
                made = self.tables.empty(requests, requests * length, length, starts, self._buffers)
            else:
                made = self.tables.empty(requests, requests, 1, None, self._buffers)
            self._graphs[key] = made
        self.forward_metadata = self._graphs[key]

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        assert self.forward_metadata is not None
        self.tables.fill(self.forward_metadata, forward_batch)

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return True

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _verified(self, forward_batch: Any, buffers: Metadata | None) -> Metadata:
        """Of requests that each have a chain or a tree of drafted tokens, which seq_lens does not count."""
        requests, length = forward_batch.batch_size, self._draft_length(forward_batch)
        if (layout := resolve_ragged_verify_layout(forward_batch)) is not None:  # chains of unequal lengths
            made = self.tables.empty(requests, self._rows(forward_batch), length, layout.qo_indptr_device, buffers, layout.verify_lens)
            made.owns_all_rows = False
            return made
        starts = torch.arange(0, (requests + 1) * length, length, dtype=torch.int32, device=self.device)
        tree = None
        if self.trees:
            assert self._verify_mask is not None
            tree = self._verify_mask.buffer[: requests * length * length].view(-1, length)
        return self.tables.empty(requests, requests * length, length, starts, buffers, length, tree)

    def _make_verify_mask(self) -> VerifyMask:
        """Which of a request's drafts each of them sees: of every request, so that SGLang always fills it in place. Of chains it is not
        read, but without it SGLang would allocate one of all keys."""
        requests = self.req_to_token_pool.req_to_token.shape[0]
        cells = tree_mask_numel(TreeMaskMode.QLEN_ONLY, requests, self._draft_tokens, 0)
        return VerifyMask(torch.zeros(cells, dtype=torch.bool, device=self.device), TreeMaskMode.QLEN_ONLY, requests, self.trees)

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """A graph reads the tree when it is replayed."""
        if cuda_graph_bs is None and self.forward_metadata is not None:
            self.tables.pack(self.forward_metadata)

    def _rows(self, forward_batch: Any) -> int:
        layout = resolve_ragged_verify_layout(forward_batch)
        return forward_batch.batch_size * self._draft_length(forward_batch) if layout is None else layout.graph_num_tokens

    def _draft_length(self, forward_batch: Any) -> int:
        given = getattr(forward_batch.spec_info, "num_tokens_per_req", 0)
        return given if given > 0 else self._draft_tokens

    # --------------------------------------------------------------------------------------------------------- forward

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **kwargs: Any) -> torch.Tensor:
        """q [tokens, num_heads * head_dim]; k, v of the new tokens, which go to the cache first -> [tokens, num_heads * v_head_dim]."""
        ours = self._find(layer)
        if kwargs:
            sinks = kwargs.pop("sinks", None)
            refuse_given(kwargs)
            if sinks is not None and "sinks" not in ours.arrays:
                ours.take_sinks(sinks)
        metadata = self.forward_metadata
        assert metadata is not None
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=metadata.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        step = metadata.window_step if ours.in_window_pool else metadata.step
        assert step is not None
        out, q, written = arrange(forward_batch, q, ours, metadata)
        step.attend(ours, q, ours.cache(), written)
        return out

    forward_decode = forward_extend

    def _find(self, layer: Any) -> Layer:
        found = self._layers.get(layer)
        if found is None:
            found = self._layers[layer] = self._make(layer)
        return found

    def _make(self, layer: Any) -> Layer:
        in_window_pool = self._window_layers.get(layer.layer_id, (0, False))[1]
        made = Layer(layer, self.token_to_kv_pool, self.page_size, self.dtype, in_window_pool)
        coverage.check_kernels(made, made.cache(), self.device, self.trees)
        return made


def refuse_given(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and value is not False:
            coverage.refuse(name, "given", "triton")


def arrange(forward_batch: Any, q: torch.Tensor, ours: Layer, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output [rows of q, num_heads * v_head_dim], the caller's where it has made one; and of q and the output the rows of the step.
    Those behind are padding. A plan takes heads and channels as one axis, so there are no views of them."""
    num_tokens = metadata.step.num_tokens
    out = forward_batch._attn_output
    out = q.new_empty(q.shape[0], ours.width) if out is None or out.dtype != q.dtype else out.view(-1, ours.width)
    if not metadata.owns_all_rows:
        out.zero_()
    if q.shape[0] == num_tokens:
        return out, q, out
    out[num_tokens:].zero_()
    return out, q[:num_tokens], out[:num_tokens]
