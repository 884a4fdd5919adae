# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism of ATTUNE_MLA under vLLM's own layers and its own code for it: the keys of a sequence are split over ranks,
each rank attends to its own, and vLLM combines outputs by their lse."""

from __future__ import annotations

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

from attune.integrations.vllm import coverage
from contract import ASKED
from contract_mla import HEADS, LATENT, NOPE, ROPE, V, AttuneMLABackend, AttuneMLAImpl, MlaEngine
from engine import BLOCK_SIZE
from ranks import Sharded, ranks  # noqa: F401  a fixture


class MlaRank(Sharded, MlaEngine):
    def __init__(self, rank, group, interleave, **options):
        self.rank, self.world_size, self.interleave = rank, group.world_size, interleave
        group.be(rank)
        super().__init__(decode_context_parallel_size=group.world_size, tensor_parallel_size=group.world_size,
                         cp_kv_cache_interleave_size=interleave, **options)


def mla_ranks(group, interleave, **options):
    engines = [MlaRank(rank, group, interleave, **options) for rank in range(group.world_size)]
    for engine in engines:
        engine.latents = engines[0].latents  # the keys are those of one sequence; heads and projections are each rank's own
    return engines


def run(group, engines, queries, **padding):
    """A step on all ranks; each one's output is compared with attention of its heads over all keys."""
    made = [engine.step(queries, **padding) for engine in engines]
    tokens = sum(queries.values())
    for i in range(len(engines[0].layers)):
        for request in queries:
            for engine in engines:
                engine.fill(engine.layers[i], request)
        q = [torch.randn(made[0].num_actual_tokens, HEADS, NOPE + ROPE) for _ in engines]
        out = [torch.full((len(q[0]), HEADS * V), torch.nan) for _ in engines]

        def forward(rank, i=i, q=q, out=out):
            layer = engines[rank].layers[i]
            layer.forward_impl(q[rank], torch.zeros(len(q[rank]), LATENT), torch.zeros(len(q[rank]), 1, ROPE), layer.kv_cache, made[rank],
                               output=out[rank])

        group.run(forward)
        for rank, engine in enumerate(engines):
            latents = {request: engine.fill(engine.layers[i], request) for request in queries}
            engine.check(engine.layers[i], q[rank][:tokens].double(), out[rank][:tokens].view(-1, HEADS, V), queries, latents)
    return made


@pytest.mark.parametrize("interleave", [1, 4, BLOCK_SIZE])
def test_decode_of_latent_attention(ranks, interleave):
    engines = mla_ranks(ranks, interleave)
    for engine in engines:
        engine.lengths = {"a": 100, "b": 0, "c": 17, "d": 3}  # some ranks have none of b's keys, or of d's
    run(ranks, engines, {"a": 1, "b": 1, "c": 1, "d": 1})
    made = run(ranks, engines, {"d": 1, "a": 1}, pad_tokens=2, pad_reqs=2)
    assert all(metadata.decode.step.query_start_loc is None for metadata in made)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_speculative_tokens_are_prompts(ranks):
    """Their masks differ from rank to rank. So graphs are of single tokens."""
    (engine, _) = mla_ranks(ranks, 1, speculative_tokens=3)
    assert engine.builder.reorder_batch_threshold == 1
    assert engine.builder.get_cudagraph_support(engine.config, None) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    check_attention_cp_compatibility(engine.config)
    engine.config.parallel_config.cp_kv_cache_interleave_size = 4
    with pytest.raises(AssertionError, match="MTP with cp_kv_cache_interleave_size > 1 is not supported in AttuneMLAImpl"):
        check_attention_cp_compatibility(engine.config)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_registry_is_asked_for_the_heads_of_all_ranks(ranks, monkeypatch):
    asked = []
    monkeypatch.setattr(coverage, "why_not", lambda capability, call: asked.append((call["q"].shape[1], tuple(call["lse"].shape))))
    mla_ranks(ranks, 1)
    assert set(asked) == {(2 * HEADS, (2, 2 * HEADS)), (2 * HEADS, (64, 2 * HEADS))}


def test_what_is_declared(monkeypatch):
    asked = {**ASKED, "use_mla": True, "head_size": 576}
    assert AttuneMLABackend.validate_configuration(**asked, use_dcp=True) == []
    assert "PCP not supported: use_pcp is True" in AttuneMLABackend.validate_configuration(**asked, use_dcp=True, use_pcp=True)
    reasons = AttuneMLABackend.validate_configuration(**{**asked, "use_dcp": True, "device_capability": DeviceCapability(7, 5)})
    assert "the kernels need 8.0" in reasons[0]
    assert AttuneMLAImpl.lse_base_on_e and AttuneMLAImpl.can_return_lse_for_decode
    calls = []
    monkeypatch.setattr(coverage, "why_not", lambda capability, call: calls.append(call))
    for use_dcp in (True, False):
        AttuneMLABackend.validate_configuration(**asked, use_dcp=use_dcp)
        assert all(("lse" in call) == use_dcp for call in calls) and calls
        calls.clear()
