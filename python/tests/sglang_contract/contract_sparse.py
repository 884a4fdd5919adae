# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention under SGLang's own DSATokenToKVPool and DSA metadata. Tokens are chosen here, as SGLang's indexer would; what
SGLang does by kernels of its own is in torch (`kernels`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import stand_ins  # noqa: F401, I001  before SGLang
from sglang.srt.environ import envs
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.models.deepseek_common import attention_backend_handler
from transformers import LlamaConfig

import attune.integrations.sglang as integration
from attune.integrations.sglang import coverage
from attune.integrations.sglang.sparse import AttuneDSABackend
from compare import assert_attention, dtype_name

from contract_mla import LATENT, NOPE, ROPE, MlaEngine
from engine import TOKENS, attention
from graphs import record, recorded  # noqa: F401

TOPK, PAGE = 12, 64


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """In the place of SGLang's kernels, which need a GPU: what each of them computes."""

    def store(buffer, slots, nope, rope):
        buffer[slots] = torch.cat([nope.view(len(slots), 1, -1), rope.view(len(slots), 1, -1)], dim=-1)

    def quantize(nope, rope):
        nope = nope.reshape(len(nope), -1, 128).float()
        scales = (nope.abs().amax(dim=-1) / 448).clamp(min=1e-4)
        codes = (nope / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
        parts = codes.flatten(1).view(torch.uint8), scales.view(torch.uint8), rope.reshape(len(nope), -1).contiguous().view(torch.uint8)
        return torch.cat(parts[:2], dim=-1).unsqueeze(1), parts[2].unsqueeze(1)

    def expand(lengths, cache_seqlens, total, max_len):
        return torch.cat([torch.arange(end - count + 1, end + 1, dtype=torch.int32)
                          for count, end in zip(lengths.tolist(), cache_seqlens.tolist())])

    def decode(page_table, topk_indices, page_size):
        return torch.where(topk_indices >= 0, page_table.gather(1, topk_indices.clamp(min=0).long()), -1)

    def prefill(page_table, topk_indices, extend_lens_cpu, page_size, output_num_tokens, page_table_is_expanded, cu_seqlens_q):
        if not page_table_is_expanded:
            page_table = page_table.repeat_interleave(torch.tensor(extend_lens_cpu), dim=0)
        padding = torch.full((output_num_tokens - len(topk_indices), topk_indices.shape[1]), -1, dtype=torch.int32)
        return torch.cat([decode(page_table, topk_indices, page_size), padding])

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(memory_pool, "set_mla_kv_buffer_triton", store)
    monkeypatch.setattr(memory_pool, "set_mla_kv_buffer_dcp_sharded_triton", store)
    monkeypatch.setattr(memory_pool, "quantize_k_cache_separate", quantize)
    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expand)
    monkeypatch.setattr(dsa_backend, "transform_index_page_table_decode", decode)
    monkeypatch.setattr(dsa_backend, "transform_index_page_table_prefill", prefill)
    monkeypatch.setattr(attention_backend_handler.AttentionBackendRegistry, "_handlers",
                        dict(attention_backend_handler.AttentionBackendRegistry._handlers))
    with envs.SGLANG_OPT_USE_TOPK_V2.override(False):  # whose plan is a kernel
        yield


class SparseEngine(MlaEngine):
    """fused: the indexer gives slots, as with SGLANG_DSA_FUSE_TOPK."""

    backend_class = AttuneDSABackend

    def __init__(self, count=2, *, packed=False, fused=True, config=None, **options):
        self.fused, self.packed = fused, packed
        if packed:
            options["kv_cache_dtype"] = torch.float8_e4m3fn
        by_default = ("flashmla_kv", "flashmla_kv") if packed else ("flashmla_sparse", "fa3")  # on Hopper
        with envs.SGLANG_DSA_FUSE_TOPK.override(fused):
            super().__init__(count, page_size=PAGE, dtype=torch.bfloat16, hisparse_coordinator=None, max_running_requests=8,
                             server=dict(zip(("dsa_prefill_backend", "dsa_decode_backend"), by_default)),
                             config=LlamaConfig(architectures=["DeepseekV32ForCausalLM"], index_topk=TOPK, **(config or {})), **options)

    def make_pool(self, window_layers):
        pool = memory_pool.DSATokenToKVPool(
            TOKENS - PAGE, PAGE, LATENT, self.kv_cache_dtype, ROPE, len(self.options), "cpu", 128, False,
            kv_cache_dim=656 if self.packed else LATENT + ROPE)
        for buffer in pool.kv_buffer:
            buffer.view(torch.uint8).fill_(0xFF)
        return pool

    def batch(self, mode, queries):
        batch = super().batch(mode, queries)
        if mode.is_extend() and not mode.is_target_verify():  # SGLang has them of prompts
            batch.seq_lens_cpu = batch.seq_lens.clone()
        return batch

    def choose(self, queries):
        """Of each token, TOPK of those that it sees, or all: numbers in the request, or slots; -1 behind them."""
        chosen = []
        for request, count in queries.items():
            places = self.requests.req_to_token[self.rows[request]]
            for end in range(self.lengths[request] - count + 1, self.lengths[request] + 1):
                tokens = torch.randperm(end)[:TOPK].to(torch.int32)
                chosen.append(torch.full((TOPK,), -1, dtype=torch.int32))
                chosen[-1][: len(tokens)] = places[tokens.long()] if self.fused else tokens
        return torch.stack(chosen)

    def tokens_of(self, chosen, request):
        """What choose has chosen for a row of the request, as numbers of its tokens."""
        chosen = chosen[chosen >= 0].long()
        places = self.requests.req_to_token[self.rows[request], : self.lengths[request]].long()
        return (chosen.unsqueeze(1) == places).int().argmax(dim=1) if self.fused else chosen

    def run(self, queries, mode=None, pad_rows=0, apart=False):
        known = all(request in self.lengths for request in queries)
        mode = mode or (ForwardMode.DECODE if known and set(queries.values()) == {1} else ForwardMode.EXTEND)
        batch = self.batch(mode, queries)
        self.backend.init_forward_metadata(batch)
        tokens = len(batch.out_cache_loc)
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(pad_rows, dtype=torch.int64)])
        for layer in self.layers:
            q, k, v = self.inputs(tokens + pad_rows)
            self.remember(layer, queries, k[:tokens], v[:tokens])
            chosen = self.choose(queries)
            parts = {"q_rope": q[..., LATENT:], "k_rope": k[..., LATENT:]} if apart else {}
            out = self.forward(layer, *((q[..., :LATENT], k[..., :LATENT]) if apart else (q, k)), v, batch, topk_indices=chosen, **parts)
            assert not out[tokens:].any()
            self.check_chosen(layer, queries, chosen, q[:tokens], out[:tokens])

    def stored(self, layer, request):
        if not self.packed:
            return super().stored(layer, request)
        slots = self.requests.req_to_token[self.rows[request], : self.lengths[request]].long()
        rows = self.pool.kv_buffer[layer.layer_id][slots].view(-1, 656)
        scales = rows[:, 512:528].contiguous().view(torch.float32).double()
        nope = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128) * scales.unsqueeze(-1)
        rope = rows[:, 528:].contiguous().view(torch.bfloat16).double()
        k = torch.cat([nope.flatten(1), rope], dim=-1).unsqueeze(1)
        return k, k[..., :LATENT]

    def check_chosen(self, layer, queries, chosen, q, out):
        rows, q = iter(zip(chosen, q.double().numpy(), out.view(-1, self.heads, self.d_v))), None
        for request, count in queries.items():
            k, v = self.stored(layer, request)
            given = self.given[request, layer.layer_id][0]
            assert ((k - given).abs() <= (2**-4 if self.packed else 0) * given.abs() + (2**-6 if self.packed else 0)).all()
            for of_row, q_row, out_row in (next(rows) for _ in range(count)):
                tokens = self.tokens_of(of_row, request)
                assert 0 < len(tokens) <= TOPK
                expected = attention(q_row[None], k[tokens].numpy(), v[tokens].numpy(), self.d**-0.5)
                assert_attention(out_row[None].float().numpy(), None, None, expected, dtype_name(out_row))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_prompts_chunks_and_decode(packed, fused):
    engine = SparseEngine(packed=packed, fused=fused)
    engine.run({"a": 11, "b": 3})
    engine.run({"a": 1, "b": 1})
    engine.run({"b": 30, "a": 9})
    engine.run({"b": 1, "a": 1}, pad_rows=2)
    engine.run({"a": 2, "c": 5}, apart=True)
    engine.run({"c": 1}, apart=True)


@pytest.mark.parametrize("fused", [False, True])
def test_verified_drafts(fused):
    engine = SparseEngine(drafts=3, fused=fused)
    engine.run({"a": 20, "b": 3})
    engine.run({"b": 3, "a": 3}, mode=ForwardMode.TARGET_VERIFY)


class SparseGraph:
    """Of decode. SGLang's DSA backend makes its metadata outside the graph, also for a replay."""

    def __init__(self, engine, requests):
        self.engine, self.requests = engine, requests
        self.buffers = {name: torch.zeros(requests, dtype=torch.int64) for name in ("req_pool_indices", "out_cache_loc", "positions")}
        self.buffers["seq_lens"] = torch.ones(requests, dtype=torch.int64)
        self.inputs = [tuple(x.contiguous() for x in engine.inputs(requests)) for _ in engine.layers]
        self.chosen = [torch.full((requests, TOPK), -1, dtype=torch.int32) for _ in engine.layers]
        batch = ForwardBatch(forward_mode=ForwardMode.DECODE, batch_size=requests, input_ids=None, seq_lens_sum=None, **self.buffers)
        engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)

        def run_once():
            engine.backend.init_forward_metadata_in_graph(batch)
            return [engine.forward(layer, *inputs, batch, topk_indices=chosen)
                    for layer, inputs, chosen in zip(engine.layers, self.inputs, self.chosen)]

        self.tape, self.outputs = record(run_once, engine.backend.on_after_cuda_graph_warmup)

    def replay(self, *requests):
        engine, count = self.engine, len(requests)
        queries = dict.fromkeys(requests, 1)
        batch = engine.batch(ForwardMode.DECODE, queries)
        for name, buffer in self.buffers.items():
            buffer.fill_(name == "seq_lens")
            buffer[:count] = getattr(batch, name)
        view = SimpleNamespace(batch_size=self.requests, forward_mode=ForwardMode.DECODE, spec_info=None, seq_lens_cpu=None, **self.buffers)
        engine.backend.init_forward_metadata_out_graph(view)
        for layer, inputs, chosen in zip(engine.layers, self.inputs, self.chosen):
            for static, new in zip(inputs, engine.inputs(self.requests)):
                static.copy_(new)
            engine.remember(layer, queries, *(x[:count] for x in inputs[1:]))
            chosen.fill_(-1)
            chosen[:count] = engine.choose(queries)
        self.tape.replay()
        for layer, inputs, chosen, out in zip(engine.layers, self.inputs, self.chosen, self.outputs):
            engine.check_chosen(layer, queries, chosen[:count], inputs[0][:count], out[:count])
            assert not out[count:].any()


@pytest.mark.parametrize("packed, fused", [(False, True), (True, True), (False, False)])
def test_graphs(packed, fused):
    engine = SparseEngine(packed=packed, fused=fused)
    engine.backend.init_cuda_graph_state(4, 4)
    large, small = SparseGraph(engine, 4), SparseGraph(engine, 2)
    engine.run({"a": 20, "b": 3, "c": 31})
    large.replay("a", "b", "c")
    small.replay("c")
    engine.run({"b": 1, "a": 1})
    large.replay("c", "a")
    small.replay("b", "c")


def test_layers_share_a_schedule():
    engine = SparseEngine(3)
    engine.run({"a": 20})
    (first, plan), *others = engine.backend._step.scheduled.values()
    assert first is engine.backend._find(engine.layers[0]) and not others
    engine.run({"a": 1})
    assert engine.backend._step.metadata is engine.backend.forward_metadata


def test_caches_are_not_copied():
    for packed, width in ((False, 576), (True, 656)):
        engine = SparseEngine(1, packed=packed)
        cache = engine.backend._find(engine.layers[0]).cache()
        assert cache.k.data_ptr() == engine.pool.kv_buffer[0].data_ptr() and cache.k.shape[-1] == width


def test_models_send_what_is_taken():
    """Prompts too: the indexer chooses for them, and none goes over all up-projected keys."""
    engine = SparseEngine(1, packed=True)
    backend = engine.backend
    assert attention_backend_handler.AttentionBackendRegistry.get_handler("attune") is attention_backend_handler.handle_attention_dsa
    backend._get_device_sm = lambda: 90  # where SGLang's own backend takes short prompts over those
    engine.run({"a": 5})
    assert backend.use_mha is False
    given = backend.get_indexer_metadata(0, SimpleNamespace(forward_mode=ForwardMode.EXTEND))
    assert given.topk_transform_method == dsa_backend.TopkTransformMethod.PAGED and not given.force_unfused_topk
    assert given.get_seqlens_expanded().tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("options, reason", [
    ({"is_draft_worker": True}, "speculative_draft_attention_backend='attune' .*: dsa"),
    ({"drafts": 4, "topk": 2}, "speculative_eagle_topk=2 .*: none .1 is covered"),
    ({"drafts": 4, "algorithm": "DSPARK"}, "speculative_algorithm='DSPARK' .*: none .EAGLE is covered"),
    ({"config": {"index_kpool": 2}}, "index_kpool=2 .*: dsa"),
    ({"config": {"learnable_sink": True}}, "learnable_sink=True .*: dsa")])
def test_what_is_refused(options, reason):
    with pytest.raises(NotImplementedError, match=f"attune: {reason}"):
        SparseEngine(1, **options)


def test_what_is_refused_of_a_server(monkeypatch):
    engine = SparseEngine(1)
    engine.runner.hisparse_coordinator = object()
    with pytest.raises(NotImplementedError, match="attune: enable_hisparse=True .*: dsa"):
        integration.create(engine.runner)
    engine.runner.hisparse_coordinator = None
    for capability in ((8, 0), (9, 0), (12, 0)):
        monkeypatch.setattr(coverage, "capability_of", lambda device: capability)
        integration.create(engine.runner)
        integration.create(SparseEngine(1, packed=True).runner)
    monkeypatch.setattr(coverage, "capability_of", lambda device: (7, 5))
    with pytest.raises(NotImplementedError, match=r"capability 7\.5 takes.*index_topk=12: .*: dsa"):
        integration.create(engine.runner)

    class Sharded(memory_pool.DSATokenToKVPool):
        pass

    engine.pool.__class__ = Sharded
    with pytest.raises(NotImplementedError, match="attune: token_to_kv_pool='Sharded' is not covered.*: dsa"):
        integration.create(engine.runner)


def test_calls_that_are_refused():
    engine = SparseEngine(1)
    batch = engine.batch(ForwardMode.EXTEND, {"a": 5})
    engine.backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="attune: topk_indices=None is not covered.*: dsa"):
        engine.forward(engine.layers[0], *engine.inputs(5), batch)
    with pytest.raises(NotImplementedError, match="attune: attn_sink='given' is not covered"):
        engine.forward(engine.layers[0], *engine.inputs(5), batch, topk_indices=engine.choose({"a": 5}), attn_sink=torch.zeros(2))
    with pytest.raises(NotImplementedError, match="attune: v_head_dim=128 is not covered.*: dsa"):
        k = torch.randn(5, 2, NOPE + ROPE).bfloat16()
        engine.forward(engine.prompts[0], k, k, k[..., :128], batch, topk_indices=engine.choose({"a": 5}), save_kv_cache=False)
