# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism under vLLM's own layers and its own code for it: the keys of a sequence are split over ranks, each rank
attends to its own, and vLLM combines outputs by their lse. A rank is a thread of this process. Of vLLM's code one function is not its
own, a Triton kernel, whose place vLLM's reference of it for the CPU takes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops import dcp
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

from attune.integrations.vllm import coverage
from contract import ASKED
from contract_mla import HEADS, LATENT, NOPE, ROPE, V, AttuneMLABackend, AttuneMLAImpl, MlaEngine
from engine import BLOCK_SIZE, PAD_SLOT


class Ranks:
    """As vLLM's GroupCoordinator, of threads."""

    device_group = None

    def __init__(self, world_size):
        self.world_size, self._here = world_size, threading.local()
        self._barrier, self._given = threading.Barrier(world_size, timeout=60), [None] * world_size

    @property
    def rank_in_group(self):
        return self._here.rank

    def be(self, rank):
        """Makes the caller a rank."""
        self._here.rank = rank

    def run(self, function):
        """-> function(rank) of each rank, all at once."""
        def one(rank):
            self.be(rank)
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(one, range(self.world_size)))

    def _all(self, tensor):
        self._given[self.rank_in_group] = tensor
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given

    def all_gather(self, tensor, dim):
        return torch.cat(self._all(tensor), dim)

    def reduce_scatter(self, tensor, dim):
        return torch.stack(self._all(tensor)).sum(0).chunk(self.world_size, dim)[self.rank_in_group]


def correct_attn_out(out, lses, cp_rank, ctx, is_lse_base_on_e=True):
    """A rank's part of vLLM's sum over ranks, and the lse of all: the others' outputs are 0."""
    outs = torch.zeros(len(lses), *out.shape)
    outs[cp_rank] = out
    return dcp._lse_weighted_combine(outs, lses, return_lse=True, is_lse_base_on_e=is_lse_base_on_e)


@pytest.fixture(params=[2, 3, 4])
def ranks(request, monkeypatch):
    torch.manual_seed(0)
    group = Ranks(request.param)
    monkeypatch.setattr(parallel_state, "_DCP", group)
    monkeypatch.setattr(dcp, "correct_attn_out", correct_attn_out)
    group.be(0)
    return group


class Sharded:
    """An engine of a rank: what is in its cache, as vLLM lays a sequence out over ranks."""

    rank, world_size, interleave = 0, 1, 1

    def place(self, position):
        """(rank that has a token, its number there): interleave tokens to each rank in turn."""
        turn, left = divmod(position, self.interleave)
        rounds, owner = divmod(turn, self.world_size)
        return owner, rounds * self.interleave + left

    def slot(self, request, position):
        owner, here = self.place(position)
        return super().slot(request, here) if owner == self.rank else PAD_SLOT

    def local(self, lengths):
        return get_dcp_local_seq_lens(lengths, self.world_size, self.rank, self.interleave)

    def stored_tokens(self, length):
        here = int(self.local(torch.tensor([length]))[0])
        assert here == sum(self.place(position)[0] == self.rank for position in range(length))
        return here

    def more_metadata(self, lengths):
        return {"dcp_local_seq_lens": self.local(lengths), "dcp_local_seq_lens_cpu_upper_bound": self.local(lengths)}


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
    assert "PCP not supported" in AttuneMLABackend.validate_configuration(**asked, use_dcp=True, use_pcp=True)
    reasons = AttuneMLABackend.validate_configuration(**{**asked, "use_dcp": True, "device_capability": DeviceCapability(7, 5)})
    assert "the kernels need 8.0" in reasons[0]
    assert AttuneMLAImpl.lse_base_on_e and AttuneMLAImpl.can_return_lse_for_decode
    calls = []
    monkeypatch.setattr(coverage, "why_not", lambda capability, call: calls.append(call))
    for use_dcp in (True, False):
        AttuneMLABackend.validate_configuration(**asked, use_dcp=use_dcp)
        assert all(("lse" in call) == use_dcp for call in calls) and calls
        calls.clear()
