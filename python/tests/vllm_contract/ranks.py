# SPDX-License-Identifier: Apache-2.0
"""Ranks of decode context parallelism: threads of this process. Of vLLM's code for it one function is not its own, a Triton kernel, whose
place vLLM's reference of it for the CPU takes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops import dcp

from engine import PAD_SLOT


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
    combined, lse = dcp._lse_weighted_combine(outs, lses, return_lse=True, is_lse_base_on_e=is_lse_base_on_e)
    return combined.to(out.dtype), lse


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
