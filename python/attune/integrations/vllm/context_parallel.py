# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism (DCP) of dense layers: each rank has some of a sequence's keys, and all ranks have the same KV head.

Queries of all ranks' heads attend to the rank's keys, vLLM combines the outputs by their lse, and `attune.merge` writes what is the rank's
own. Where a request has one query, its own key is among the ranks' keys. Where it has more, a causal mask would differ from rank to
rank, so the ranks' keys are those before the step, and the step's own tokens, which every rank has, attend among themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group, get_dcp_world_size_and_rank
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops import dcp

import attune

from .._plans import Plans
from .._step import Attending, Form, Step
from . import coverage


@dataclass
class ParallelStep:
    local: Step  # over the rank's keys
    new: Step | None  # of the step's tokens among themselves; None: they are in local


class ParallelSteps:
    """Makes them, for a metadata builder."""

    def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
        self.world_size, self._rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self._interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        # Which captured graphs read in each replay.
        self._lengths = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)

    def make(self, plans: Plans, step: Step, common: Any) -> ParallelStep:
        decode = step.query_start_loc is None
        rounds = -(-step.max_seq_len // (self.world_size * self._interleave))
        local = Step.of(plans, step.num_tokens, step.num_reqs, step.max_query_len, rounds * self._interleave, step.query_start_loc,
                        common.dcp_local_seq_lens if decode else self._context(step), step.block_table)
        return ParallelStep(local, None if decode else step)

    def _context(self, step: Step) -> torch.Tensor:
        """int32 [num_reqs]: the rank's keys before the step's."""
        starts = step.query_start_loc
        assert starts is not None
        before = step.seq_lens - (starts[1:] - starts[:-1])
        lengths = get_dcp_local_seq_lens(before, self.world_size, self._rank, self._interleave)
        return self._lengths[: step.num_reqs].copy_(lengths)


class ContextParallel:
    """Attention of a layer."""

    def __init__(self, impl: Any) -> None:
        """Raises NotImplementedError, by the name of the argument, for what is not covered."""
        for name, value, why in (
                ("sliding_window", impl.fields.get("window_left"), "vLLM splits no such cache over ranks"),
                ("alibi_slopes", impl.arrays["alibi_slopes"], "a rank does not know the positions of its keys"),
                ("kv_sharing_target_layer_name", impl.kv_sharing_target_layer_name, "the step's own keys are those of another layer"),
                ("num_kv_heads", None if impl.num_kv_heads == 1 else impl.num_kv_heads, "ranks have one KV head, the same one")):
            if value is not None:
                raise NotImplementedError(f"{name} is not covered with decode_context_parallel_size={impl.dcp_world_size}: {why}")
        config = get_current_vllm_config_or_none()
        a2a = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
        self._combine = dcp.dcp_a2a_lse_reduce if a2a else dcp.cp_lse_ag_out_rs
        self.take_kind(impl)

    def take_kind(self, impl: Any) -> None:
        """Once it is complete. Sinks count once, in the merge."""
        everywhere: dict[str, Any] = {"num_heads": impl.num_heads * impl.dcp_world_size, "arrays": {}, "returns_lse": True}
        self.decode = Form.of(impl, **everywhere)
        self._context = Form.of(impl, **everywhere, fields={name: value for name, value in impl.fields.items() if name != "causal"})
        self._new = Form.of(impl, arrays={}, returns_lse=True)

    def refusal(self, impl: Any) -> str | None:
        asked = {"head_size": impl.head_size, "num_kv_heads": 1, "dtype": impl.dtype, "kv_cache_dtype": impl.kv_cache_dtype,
                 "block_size": None, "returns_lse": True}
        for form, new_tokens in ((self.decode, False), (self._context, False), (self._new, True)):
            reason = coverage.refusal(coverage.engine_capability(), num_heads=form.num_heads, new_tokens=new_tokens, **asked, **form.fields)
            if reason is not None:
                return reason
        return None

    def make_plans(self, step: ParallelStep, cache: attune.KVCache) -> None:
        step.local.plan(self._local(step), cache)
        if step.new is not None:
            step.new.plan(self._new, None)

    def _local(self, step: ParallelStep) -> Attending:
        return self.decode if step.new is None else self._context

    def attend(self, step: ParallelStep, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, cache: attune.KVCache,
               sinks: torch.Tensor | None, out: torch.Tensor, out_scale: torch.Tensor | None) -> None:
        """query, out: [tokens, num_heads, head_size]; key, value: [tokens, 1, head_size]."""
        group = get_dcp_group()
        queries = group.all_gather(query.contiguous(), dim=1)
        partial, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:-1], dtype=torch.float32)
        step.local.attend(self._local(step), queries, cache, partial, lse=lse)
        ours, ours_lse = self._combine(partial, lse, group, return_lse=True)
        outs, lses = ours.unsqueeze(0), ours_lse.unsqueeze(0)
        if step.new is not None:
            if key is None or value is None:
                raise NotImplementedError("ATTUNE: key is None, which is not covered where ranks share a sequence and a request has more "
                                          "than one query")
            outs, lses = torch.stack([ours, torch.empty_like(ours)]), torch.stack([ours_lse, torch.empty_like(ours_lse)])
            step.new.attend_new(self._new, query, key, value, outs[1], lse=lses[1])
        attune.merge(outs, lses, sinks=sinks, out=out, out_scale=out_scale)
