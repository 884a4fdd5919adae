# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism of ATTUNE, with vLLM's own layers, metadata and code for it: the keys of a sequence are split over ranks that
have the same KV head, and each rank's output is that of its heads over all keys."""

from __future__ import annotations

import re

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

from attune.integrations.vllm import coverage
from attune.integrations.vllm.impl import AttuneImpl
from contract import KINDS, serve
from contract_outputs import E4M3, QuantisedEngine
from engine import BLOCK_SIZE, Engine
from ranks import Sharded, ranks  # noqa: F401  a fixture


class Rank(Sharded, Engine):
    def __init__(self, rank, group, interleave, layers, **options):
        self.rank, self.world_size, self.interleave = rank, group.world_size, interleave
        group.be(rank)
        super().__init__(layers, **{"heads": 4, **options}, heads_kv=1, decode_context_parallel_size=group.world_size,
                         tensor_parallel_size=group.world_size, cp_kv_cache_interleave_size=interleave)

    def stored(self, layer, request):
        """Of all ranks."""
        length, parts = self.lengths[request], []
        for engine in self.all:
            engine.lengths[request] = engine.stored_tokens(length)
            parts.append(Engine.stored(engine, engine.layers[self.layers.index(layer)], request))
            engine.lengths[request] = length
        places = [self.place(position) for position in range(length)]
        return torch.stack([parts[owner][here] for owner, here in places])


class Rank8(Rank):
    """Its outputs have 8 bits."""

    scale, compare = 0.01, QuantisedEngine.compare

    @property
    def scales(self):
        return dict.fromkeys(self.layers, torch.tensor([self.scale]))


class Parallel:
    """The ranks as one engine: `serve` runs it."""

    def __init__(self, group, interleave, layers, of=Rank, **options):
        self.group, self.eight_bit = group, of is Rank8
        self.engines = [of(rank, group, interleave, layers, **options) for rank in range(group.world_size)]
        for engine in self.engines:
            engine.all = self.engines

    def run(self, queries, *, checked=True, pad_rows=0, **padding):
        first = self.engines[0]
        made = [engine.step(queries, **padding) for engine in self.engines]
        rows = sum(queries.values()) + padding.get("pad_tokens", 0) + pad_rows
        for i in range(len(first.layers)):
            k, v = (torch.randn(rows, 1, first.d).to(first.dtype) for _ in range(2))
            q = [torch.randn(rows, first.heads, first.d).to(first.dtype) for _ in self.engines]
            out = [torch.full_like(q[0], torch.nan).to(E4M3 if self.eight_bit else first.dtype) for _ in self.engines]

            def forward(rank, i=i, q=q, k=k, v=v, out=out):
                engine = self.engines[rank]
                layer = engine.layers[i]
                layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, engine.slots[layer.layer_name])
                scale = engine.scales[layer] if self.eight_bit else None
                layer.impl.forward(layer, q[rank], k, v, layer.kv_cache, made[rank], out[rank], scale)

            self.group.run(forward)
            for engine in self.engines:
                engine.remember(engine.layers[i], k, v)
            for rank, engine in enumerate(self.engines if checked else []):
                engine.check(engine.layers[i], q[rank], out[rank])
        return made


@pytest.mark.parametrize("interleave", [1, 4, BLOCK_SIZE])
def test_prompts_decode_and_speculative_tokens(ranks, interleave):
    serve(Parallel(ranks, interleave, [{}, {}]))


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("kind", ["sinks", "softcap"])
def test_kinds_of_layers(ranks, kind):
    layer = {**KINDS[kind], "sinks": torch.linspace(-1, 2, 4)} if kind == "sinks" else KINDS[kind]
    serve(Parallel(ranks, 4, [layer]))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_outputs_of_8_bits_over_a_cache_of_8_bits(ranks):
    parallel = Parallel(ranks, 1, [{}], of=Rank8, kv_cache_dtype="int8_per_token_head", dtype=torch.bfloat16)
    parallel.run({"a": 20, "b": 30}, checked=False)  # whose own tokens attend to what they were, not to what is stored
    for _ in range(3):
        parallel.run({"b": 1, "a": 1})


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_outputs_of_8_bits(ranks):
    serve(Parallel(ranks, 1, [{}], of=Rank8))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_plans_are_made_with_the_metadata(ranks):
    parallel = Parallel(ranks, 1, [{}, KINDS["softcap"], {}])
    for queries, of_a_kind in (({"a": 20, "b": 3}, 2), ({"a": 1, "b": 1}, 1)):
        before = [len(engine.builder._plans._plans) for engine in parallel.engines]
        for engine in parallel.engines:
            engine.step(queries)
        made = [len(engine.builder._plans._plans) for engine in parallel.engines]
        assert [count - past for count, past in zip(made, before)] == [2 * of_a_kind] * 2


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_graphs_read_lengths_where_they_were(ranks):
    (engine, _) = Parallel(ranks, 1, [{}]).engines
    first = engine.step({"a": 9, "b": 3}).parallel.local.seq_lens
    assert first.tolist() == [0, 0]
    second = engine.step({"a": 4, "b": 2}).parallel.local.seq_lens
    assert second.data_ptr() == first.data_ptr() and first.tolist() == [5, 2]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_what_is_declared(ranks, monkeypatch):
    (engine, _) = Parallel(ranks, 4, [{}]).engines
    assert engine.builder.get_cudagraph_support(engine.config, None) == AttentionCGSupport.ALWAYS
    assert AttuneImpl.lse_base_on_e and AttuneImpl.can_return_lse_for_decode
    engine.config.speculative_config = object()
    check_attention_cp_compatibility(engine.config)
    asked = []
    monkeypatch.setattr(coverage, "why_not", lambda capability, call: asked.append(
        (call["q"].shape[1], call["cache"] is not None, "causal" in call, tuple(call["lse"].shape))))
    Parallel(ranks, 4, [{}])
    assert set(asked) == {(heads, cached, causal, (rows, heads)) for rows in (2, 64)
                          for heads, cached, causal in ((8, True, True), (8, True, False), (4, False, True))}


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("layer, options, reason", [
    ({"per_layer_sliding_window": 7}, {}, "sliding_window is not covered with decode_context_parallel_size=2: vLLM splits no such cache"),
    ({"alibi_slopes": [0.5, 0.25]}, {}, "alibi_slopes is not covered with decode_context_parallel_size=2"),
    ({}, {"heads_kv": 2}, "num_kv_heads is not covered with decode_context_parallel_size=2: ranks have one KV head")])
def test_what_a_layer_refuses(ranks, layer, options, reason):
    given = {"num_heads": 2, "head_size": 32, "scale": 1.0, "num_kv_heads": options.get("heads_kv", 1)}
    with pytest.raises(NotImplementedError, match="^ATTUNE: " + re.escape(reason)):
        AttuneImpl(**given, sliding_window=layer.get("per_layer_sliding_window"), alibi_slopes=layer.get("alibi_slopes"))
