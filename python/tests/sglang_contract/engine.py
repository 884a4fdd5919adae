# SPDX-License-Identifier: Apache-2.0
"""The part of SGLang's ModelRunner that is around attention, made of SGLang's own classes: pools, layers, batches, the forward context.
On the CPU; what the layers compute is compared with the float64 reference."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

import stand_ins  # noqa: F401, I001  before SGLang
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import build_attention_backends
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import LlamaConfig

from compare import assert_attention, dtype_name

CONTEXT_LEN, REQUESTS, TOKENS = 96, 8, 480
TIERS = (4, 8, 16, 32)  # rows of a batch whose requests have unequal numbers of drafts

_alone = get_parallel().override(attn_tp_size=1, attn_cp_size=1, attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False)  # a process
_alone.__enter__()


def publish(**fields):
    """Resolved configuration of a server, as its processes read it; until the next call."""
    global _published
    if _published is not None:
        _published.restore()
    _published = get_context().override_server_args(attention_backend="attune", **fields)
    _published.install()


_published = None


def model_config(architecture=AttentionArch.MHA, config=None, **fields):
    config = config or LlamaConfig(architectures=["LlamaForCausalLM"])
    return SimpleNamespace(attention_arch=architecture, context_len=CONTEXT_LEN, is_encoder_decoder=False, hf_config=config,
                           hf_text_config=config, linear_attn_registry_result=None, quantization=None, **fields)


class Engine:
    """layers: keyword arguments of SGLang's RadixAttention, one dict each. window_layers: those whose keys lie in SWAKVPool's other pool.
    between: layers of linear attention before each. drafts: speculative tokens a request. server: other resolved fields."""

    def __init__(self, layers, *, page_size=1, dtype=torch.float32, kv_cache_dtype=None, heads=4, heads_kv=2, d=32, d_v=None,
                 window_layers=(), between=0, drafts=0, topk=1, algorithm="EAGLE", server=None, **runner):
        self.heads, self.heads_kv, self.d, self.d_v, self.dtype, self.page_size = heads, heads_kv, d, d_v or d, dtype, page_size
        publish(speculative_algorithm=algorithm if drafts else None, speculative_eagle_topk=topk if drafts else None,
                speculative_num_draft_tokens=drafts or None, **(server or {}))
        self.drafts, self.topk, self.between, self.algorithm = drafts, topk, between, algorithm
        self.options = {i * (between + 1) + between: options for i, options in enumerate(layers)}  # by the id of the layer
        self.kv_cache_dtype = kv_cache_dtype or dtype
        self.layers = self.make_layers()
        self.requests = ReqToTokenPool(REQUESTS, CONTEXT_LEN, "cpu", False)
        self.requests.req_to_token.fill_(TOKENS - 1)  # what is left of requests before
        self.pool = self.make_pool(tuple(window_layers))
        self.runner = SimpleNamespace(**{
            "device": "cpu", "dtype": dtype, "kv_cache_dtype": self.kv_cache_dtype, "page_size": page_size,
            "model": torch.nn.ModuleList(self.modules()), "model_config": model_config(),
            "use_mla_backend": False, "is_draft_worker": False, "draft_attention_backend": None,
            "prefill_attention_backend_str": "attune", "decode_attention_backend_str": "attune", "server_args": None,
            "spec_algorithm": SpeculativeAlgorithm.from_string(algorithm if drafts else None), "req_to_token_pool": self.requests,
            "token_to_kv_pool": self.pool, "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: self.pool), **runner})
        self.runner.kv_index_translator = KVIndexTranslator(
            req_to_token=self.requests.req_to_token, token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
            token_to_kv_pool=self.pool, page_size=page_size, device="cpu")
        self.backend = build_attention_backends(model_runner=self.runner).attn_backend
        self.rows, self.lengths = {}, {}  # request -> its row in req_to_token, its tokens in the cache
        self.given = {}  # request, layer -> what was put there: K [tokens, heads_kv, d], V
        self.trees = None
        self.free = list(np.random.default_rng(0).permutation(np.arange(1, TOKENS // page_size)))  # page 0 is for padding

    def make_layers(self):
        made = []
        for i, options in self.options.items():
            given = {name: value for name, value in options.items() if name not in ("sinks", "scales")}
            made.append(RadixAttention(**{"num_heads": self.heads, "head_dim": self.d, "scaling": self.d**-0.5,
                                          "num_kv_heads": self.heads_kv, "layer_id": i, "v_head_dim": self.d_v, **given}))
        return made

    def modules(self):
        """The model's, among which a backend finds its layers."""
        return self.layers

    def make_pool(self, window_layers):
        count = len(self.layers)
        shape = {"page_size": self.page_size, "dtype": self.kv_cache_dtype, "head_num": self.heads_kv, "head_dim": self.d,
                 "v_head_dim": self.d_v, "device": "cpu", "enable_memory_saver": False}
        for layer, options in zip(self.layers, self.options.values()):
            if "scales" in options:
                layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(s), requires_grad=False) for s in options["scales"])
        if self.between:
            shape.pop("v_head_dim")
            pool = HybridLinearKVPool(TOKENS - self.page_size, full_attention_layer_ids=list(self.options), **shape,
                                      mamba_pool=SimpleNamespace(mem_usage=0, get_kv_size_bytes=lambda: (0, 0)))
            _poison(pool.full_kv_pool)
            return pool
        if not window_layers:
            pool = MHATokenToKVPool(TOKENS - self.page_size, layer_num=count, **shape)
            _poison(pool)
            return pool
        pool = SWAKVPool(TOKENS - self.page_size, TOKENS - self.page_size, swa_attention_layer_ids=list(window_layers),
                         full_attention_layer_ids=[i for i in range(count) if i not in window_layers], **shape)
        _poison(pool.full_kv_pool), _poison(pool.swa_kv_pool)
        pages = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(TOKENS // self.page_size - 1)])
        slots = pages[:, None] * self.page_size + torch.arange(self.page_size)
        pool.register_mapping(torch.cat([slots.flatten(), torch.tensor([-1])]))
        return pool

    # ----------------------------------------------------------------------------------------------------------- batches

    def slots(self, request, first, last):
        """Of tokens [first, last) of a request; pages are taken as they are needed."""
        row = self.rows.setdefault(request, len(self.rows) + 1)
        table = self.requests.req_to_token[row]
        for start in range(-(-first // self.page_size) * self.page_size, last, self.page_size):
            page = int(self.free.pop())
            end = min(start + self.page_size, CONTEXT_LEN)
            table[start:end] = torch.arange(page * self.page_size, page * self.page_size + end - start)
        return table[first:last].long()

    def batch(self, mode, queries):
        """A ForwardBatch for queries: request -> new tokens, in the order of the dict."""
        before = {request: self.lengths.get(request, 0) for request in queries}
        where = torch.cat([self.slots(request, before[request], before[request] + count) for request, count in queries.items()])
        for request, count in queries.items():
            self.lengths[request] = before[request] + count
        counted = before if mode.is_target_verify() else self.lengths
        lengths = torch.tensor([counted[request] for request in queries])
        positions = torch.cat([torch.arange(before[request], before[request] + count) for request, count in queries.items()])
        batch = ForwardBatch(
            forward_mode=mode, batch_size=len(queries), input_ids=torch.zeros(len(where), dtype=torch.int64),
            req_pool_indices=torch.tensor([self.rows[request] for request in queries]), seq_lens=lengths, out_cache_loc=where,
            seq_lens_sum=None, seq_lens_cpu=None, positions=positions)  # no mirrors: needs_cpu_seq_lens is False
        if mode.is_target_verify():
            batch.spec_info = self.verify_input(len(queries), list(queries.values()))
            self.draw_trees(len(queries))
        elif mode.is_extend(include_draft_extend_v2=True):
            if mode.is_draft_extend_v2():
                batch.spec_info = EagleDraftExtendInput(num_tokens_per_req=self.drafts)
            batch.extend_prefix_lens = torch.tensor(list(before.values()), dtype=torch.int32)
            batch.extend_seq_lens = torch.tensor(list(queries.values()), dtype=torch.int32)
            batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = list(before.values()), list(queries.values())
            batch.extend_num_tokens = len(where)
        return batch

    def verify_input(self, requests, counts):
        """counts: drafted tokens of each, which differ where DSPARK drafts."""
        if self.algorithm == "DSPARK":
            return self.ragged_input(RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=counts, device="cpu", grid=TIERS))
        return EagleVerifyInput(
            draft_token=None, custom_mask=None, positions=None, retrieve_index=None, retrieve_next_token=None, retrieve_next_sibling=None,
            retrieve_cum_len=None, spec_steps=self.drafts - 1, topk=self.topk, draft_token_num=self.drafts,
            capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None)

    def ragged_input(self, layout):
        return DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=self.drafts, ragged_verify_layout=layout)

    def draw_trees(self, requests):
        """Writes the mask where build_tree_kernel_efficient does, if drafts are trees: a token sees itself and those above it."""
        self.trees = None
        if self.topk > 1:
            mask, length = self.backend.verify_mask, self.drafts
            assert mask.is_read and mask.mode == TreeMaskMode.QLEN_ONLY and mask.fits(requests)
            self.trees = torch.zeros(requests, length, length, dtype=torch.bool)
            for tree in self.trees:
                for i in range(length):
                    if i:
                        tree[i] = tree[int(torch.randint(i, ()))]
                    tree[i, i] = True
            mask.buffer.fill_(True)
            mask.buffer[: self.trees.numel()] = self.trees.flatten()

    def inputs(self, tokens):
        """q, k, v: views of one projection, as models have them."""
        widths = [self.heads * self.d, self.heads_kv * self.d, self.heads_kv * self.d_v]
        return torch.randn(tokens, sum(widths)).to(self.dtype).split(widths, dim=-1)

    def forward(self, layer, q, k, v, batch, backend=None, **options):
        """backend: the engine's, if none is given."""
        sinks = self.options[layer.layer_id].get("sinks")
        extra = {} if sinks is None else {"sinks": sinks}
        with forward_context(ForwardContext(attn_backend=backend or self.backend)):
            return layer(q, k, v, batch, **extra, **options)

    def run(self, queries, mode=None, pad_rows=0, counted=True):
        """A step through every layer; each output is compared. pad_rows: of q, k and v, as where ranks of data parallelism meet;
        counted: SGLang's layers know how many they are, and leave them out."""
        known = all(request in self.lengths for request in queries)
        mode = mode or (ForwardMode.DECODE if known and set(queries.values()) == {1} else ForwardMode.EXTEND)
        batch = self.batch(mode, queries)
        tokens = len(batch.out_cache_loc)
        if pad_rows:  # as prepare_mlp_sync_batch does it
            batch.global_num_token_non_padded_cpu, batch.extend_num_tokens = tokens if counted else None, tokens + pad_rows
            batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(pad_rows, dtype=torch.int64)])
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v = self.inputs(tokens + pad_rows)
            self.remember(layer, queries, k, v)
            out = self.forward(layer, q, k, v, batch)
            assert out.shape == (tokens + pad_rows, self.heads * self.d_v) and not out[tokens:].any()
            self.check(layer, queries, q[:tokens], out[:tokens])
        return batch

    # ------------------------------------------------------------------------------------------------------------ checks

    def remember(self, layer, queries, k, v):
        k, v = k.view(-1, self.heads_kv, self.d), v.view(-1, self.heads_kv, self.d_v)
        at = 0
        for request, count in queries.items():
            new = [x[at : at + count].double() for x in (k, v)]
            old = self.given.get((request, layer.layer_id), [x[:0] for x in new])
            # What was rejected of a verified chain is overwritten.
            kept = self.lengths[request] - count
            self.given[request, layer.layer_id] = [torch.cat([o[:kept], n]) for o, n in zip(old, new)]
            at += count

    def stored(self, layer, request):
        """K and V of a request as SGLang says that they lie in the layer's cache, in float64."""
        slots = self.requests.req_to_token[self.rows[request], : self.lengths[request]].long()
        if isinstance(self.pool, SWAKVPool) and self.pool.layers_mapping[layer.layer_id][1]:
            slots = self.pool.translate_loc_from_full_to_swa(slots)
        sides = []
        for side, scale in zip(self.pool.get_kv_buffer(layer.layer_id), (layer.k_scale, layer.v_scale)):
            if side.dim() == 4:  # pages, heads, tokens of a page
                side = side.transpose(1, 2).flatten(0, 1)
            sides.append(side[slots].float().double() * (1 if scale is None else scale.double()))
        return sides

    def check(self, layer, queries, q, out):
        stored = [self.stored(layer, request) for request in queries]
        step = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}.get(self.kv_cache_dtype, 0)  # half a step of the codes
        for request, history in zip(queries, stored):
            for has, given in zip(history, self.given[request, layer.layer_id]):
                assert ((has - given).abs() <= step * given.abs() + (2**-9 if step else 0)).all(), "not what was given to the cache"
        options = self.options[layer.layer_id]
        sinks = options.get("sinks")
        fields = {"scale": options.get("scaling", self.d**-0.5), "window_left": options.get("sliding_window_size", -1),
                  "softcap": options.get("logit_cap"),
                  "sinks": None if sinks is None else sinks.detach().double().numpy()}
        parts, q, at = [], q.reshape(-1, self.heads, self.d).double().numpy(), 0
        trees = self.trees if self.trees is not None and len(q) == self.trees[..., 0].numel() else len(queries) * [None]
        for (k, v), count, tree in zip(stored, queries.values(), trees):
            parts.append(attention(q[at : at + count], k.numpy(), v.numpy(), tree=tree, **fields))
            at += count
        expected = SimpleNamespace(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])})
        out = out.reshape(-1, self.heads, self.d_v)
        assert_attention(out.float().numpy(), None, None, expected, dtype_name(out))


def attention(q, k, v, scale, window_left=-1, softcap=None, sinks=None, tree=None):
    """Causal attention of the last tokens of a sequence in float64, as `reference.attention` has it, of all rows at once. tree: which
    of these tokens each one sees."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    rows, keys = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))[None]
    seen = (keys <= rows) & ((keys >= rows - window_left) | (window_left < 0))
    if tree is not None:
        seen[:, -len(q) :] &= tree.numpy()
    z = scale * np.einsum("nhd,shd->hns", q, k)
    z = softcap * np.tanh(z / softcap) if softcap else z
    z = np.where(seen, z, -np.inf)
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    denominator = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        denominator = denominator + np.exp(sinks[:, None, None] - z.max(axis=-1, keepdims=True))
    weights /= denominator
    products = scale * np.where(seen, np.einsum("nhd,shd->hns", abs(q), abs(k)), 0).max(axis=-1)
    return SimpleNamespace(out=np.einsum("hns,shd->nhd", weights, v), weight=np.einsum("hns,shd->nhd", weights, abs(v)),
                           products=products.T)


def _poison(pool):
    """NaN: slots that are not written must not be read."""
    for buffer in [*pool.k_buffer, *pool.v_buffer]:
        buffer.view(torch.uint8).fill_(0xFF)
