# SPDX-License-Identifier: Apache-2.0
"""Outputs of 8 bits, quantised by attention as vLLM's AttnQuantFusionPass has it: the pass asks fused_output_quant_supported, and makes
calls of unified_attention_with_output with a scale and an output of e4m3. No compiler is needed for those calls."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import unified_attention_with_output, unified_kv_cache_update
from vllm.model_executor.layers.quantization.utils import quant_utils

from attune.integrations import _plans as plans
from attune.integrations.vllm import coverage
from compare import assert_attention
from contract import KINDS, serve
from engine import Engine

E4M3 = torch.float8_e4m3fn


class QuantisedEngine(Engine):
    """Each layer with a scale of its own; of one shape or another, as layers of vLLM have them."""

    def __init__(self, layers, **options):
        super().__init__(layers, **options)
        shapes = [(1,), (), (1, 1)]
        self.scales = {layer: torch.full(shapes[i % 3], 0.002 + 0.004 * i) for i, layer in enumerate(self.layers)}

    def forward(self, layer, q, k, v, metadata="this step's"):
        with set_forward_context(self.metadata if metadata else None, self.config, slot_mapping=self.slots if metadata else {}):
            if metadata and layer.kv_sharing_target_layer_name is None:
                unified_kv_cache_update(k, v, layer.layer_name)
            out = torch.full(q.shape, torch.nan).to(E4M3)
            unified_attention_with_output(q, k, v, out, layer.layer_name, output_scale=self.scales[layer])
        return out

    def compare(self, layer, out, expected, dtype):
        assert out.dtype == E4M3
        scale = float(self.scales[layer])
        expected.out = np.clip(expected.out, -448 * scale, 448 * scale)
        assert_attention(out.float().numpy() * scale, None, None, expected, dtype, "float8_e4m3fn")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["plain", "gpt_oss", "softcap"])
def test_kinds_of_layers(kind):
    serve(QuantisedEngine([KINDS[kind]] * 3))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_bfloat16(kv_cache_dtype):
    engine = QuantisedEngine([{}, {}], dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    for layer in engine.layers:
        layer._k_scale.fill_(0.02), layer._v_scale.fill_(0.03)
    serve(engine)


def test_scales_are_read_in_each_run(monkeypatch):
    """As a graph would read them: the same metadata is right after vLLM has put other weights in their place. A launch for all layers."""
    made = []
    real = torch._foreach_reciprocal_
    monkeypatch.setattr(torch, "_foreach_reciprocal_", lambda scales: (made.append(len(scales)), real(scales)))
    engine = QuantisedEngine([{}] * 3)
    engine.run({"a": 20, "b": 3})
    assert made == [1, 1, 1]  # none was known before
    for _ in range(2):
        made.clear()
        for scale in engine.scales.values():
            scale.data.mul_(1.7)
        for layer in engine.layers:
            q, stored = torch.randn(23, 8, 32), torch.cat([engine.given[request, layer.layer_name] for request in "ab"]).float()
            engine.check(layer, q, engine.forward(layer, q, *stored.unbind(1)))
        assert made == [3]


def test_plans_are_made_with_the_metadata_once_the_profiling_run_has_been(monkeypatch):
    made = []

    class Plan(plans.attune.Plan):
        def __init__(self, **fields):
            made.append(fields)
            super().__init__(**fields)

    monkeypatch.setattr(plans.attune, "Plan", Plan)
    engine = QuantisedEngine([{}, {}])
    q, k, v = torch.randn(3, 8, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    for layer in engine.layers:
        assert not engine.forward(layer, q, k, v, metadata=None).float().any()
    engine.bind()
    engine.step({"a": 2, "b": 1})
    assert [fields["out"].dtype for fields in made] == ["float32"] * 2 + ["float8_e4m3fn"] * 2  # the first of a pair is for its size
    made.clear()
    for layer in engine.layers:
        engine.forward(layer, q, k, v)
    assert not made


def test_what_is_offered(monkeypatch):
    impl = Engine([{}]).layers[0].impl
    assert impl.fused_output_quant_supported(quant_utils.kFp8StaticTensorSym)
    for key in ("kNvfp4Dynamic", "kFp8DynamicTokenSym", "kFp8Dynamic128Sym"):
        assert not impl.fused_output_quant_supported(getattr(quant_utils, key))
    monkeypatch.setattr(coverage, "why_not", lambda capability, call: "not e4m3" if call["out"].dtype == "float8_e4m3fn" else None)
    assert not impl.fused_output_quant_supported(quant_utils.kFp8StaticTensorSym)


def test_what_is_refused(monkeypatch):
    engine = QuantisedEngine([{}])
    (layer,) = engine.layers
    q, out = torch.randn(3, 8, 32), torch.empty(3, 8, 32, dtype=E4M3)
    with pytest.raises(NotImplementedError, match="ATTUNE: output_block_scale is given; outputs of e4m3 with a scale per tensor are covered"):
        layer.impl.forward(layer, q, None, None, layer.kv_cache, None, out, torch.ones(1), torch.ones(1))
    with pytest.raises(NotImplementedError, match=re.escape("ATTUNE: output_scale has shape (8,); one scale is covered")):
        layer.impl.forward(layer, q, None, None, layer.kv_cache, None, out, torch.ones(8))
    monkeypatch.setattr(coverage, "why_not", lambda capability, call: "it has no such output")
    with pytest.raises(NotImplementedError, match="ATTUNE: output_scale is given: no kernel of Attune on the CPU takes.*it has no such output"):
        layer.impl.forward(layer, q, None, None, layer.kv_cache, None, out, torch.ones(1))
