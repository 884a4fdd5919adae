# SPDX-License-Identifier: Apache-2.0
"""What is not offered to vLLM's fusions, and why: these tests fail where the why does."""

from __future__ import annotations

import re

import pytest
import torch
from vllm.config import compilation
from vllm.config.compilation import PassConfig
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.v1.attention.backend import MLAAttentionImpl

import attune
import attune.integrations.vllm as integration

integration.register()

from engine import Engine  # noqa: E402


class Cuda(Platform):
    _enum, device_type = PlatformEnum.CUDA, "cuda"


def mla_impls():
    if integration.backend_name() == "CUSTOM":
        pytest.skip("this vLLM takes no new names of backends: there is no ATTUNE_MLA")
    from attune.integrations.vllm.mla import AttuneMLAImpl
    from attune.integrations.vllm.sparse import AttuneMLASparseImpl

    return AttuneMLAImpl, AttuneMLASparseImpl


def test_rope_with_the_cache_update_is_asked_for_on_rocm_alone(monkeypatch):
    monkeypatch.setattr(compilation, "current_platform", Cuda())
    asked = PassConfig(fuse_rope_kvcache=True, fuse_qk_norm_rope_kvcache=True)
    assert not asked.fuse_rope_kvcache and not asked.fuse_qk_norm_rope_kvcache
    impl = Engine([{}]).layers[0].impl
    for name in ("rope", "qk_norm_rope", "qk_norm_mrope"):
        assert not getattr(impl, f"fused_{name}_kvcache_supported", lambda: False)()


def test_rope_with_the_cache_update_of_latents_is_vllms_own(monkeypatch):
    """MLARoPEKVCacheCatFusionPass asks no backend: it puts an operation of vLLM's in place of do_kv_cache_update, which so has to be
    vLLM's as well."""
    monkeypatch.setattr(compilation, "current_platform", Cuda())
    assert PassConfig(fuse_rope_kvcache_cat_mla=True).fuse_rope_kvcache_cat_mla
    for impl in mla_impls():
        assert impl.do_kv_cache_update is MLAAttentionImpl.do_kv_cache_update


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_8_bits_would_take_prompts_from_the_prefill_kernels(dtype, monkeypatch):
    (layer,) = Engine([{}], dtype=dtype, kv_cache_dtype="fp8").layers
    assert not layer.impl.supports_quant_query_input and layer.query_quant is None
    pages, number = attune.Spec((2, 8, 16, 128), "float8_e4m3fn"), attune.Spec((1,), "float32")
    cache = attune.KVCache(pages, pages, layout="hnd", k_scale=number, v_scale=number, page_table=attune.Spec((2, 2), "int32"))
    prompt = {"cache": cache, "seqused_kv": attune.Spec((2,), "int32"), "cu_seqlens_q": attune.Spec((3,), "int32"), "causal": True,
              "out": attune.Spec((64, 32, 128), str(dtype)[6:]), "capability": (9, 0)}
    for kernel in ("cuda_prefill", "cuda_prefill_mma", "cuda_prefill_fp32", "cuda_mixed"):
        monkeypatch.setenv("ATTUNE_KERNEL", kernel)
        assert attune.supported(attune.Spec((64, 32, 128), str(dtype)[6:]), **prompt)
        quantised = attune.supported(attune.Spec((64, 32, 128), "float8_e4m3fn"), **prompt, prologue=attune.Prologue(
            qkv_scale=attune.Spec((3,), "float32")))
        assert "lacks query dtype: e4m3" in quantised.reason


def test_queries_of_8_bits_of_latent_attention(monkeypatch):
    """No CUDA kernel takes latents of 8 bits, for which alone vLLM would make such queries."""
    cache = attune.KVCache(attune.Spec((2, 16, 1, 576), "float8_e4m3fn"), k_scale=attune.Spec((1,), "float32"),
                           page_table=attune.Spec((2, 2), "int32"))
    for q, kernel in (("bfloat16", "cuda_mla"), ("float8_e4m3fn", "cuda_mla"), ("bfloat16", "cuda_mla_mma")):
        monkeypatch.setenv("ATTUNE_KERNEL", kernel)
        step = attune.supported(attune.Spec((2, 16, 576), q), cache=cache, seqused_kv=attune.Spec((2,), "int32"), causal=True,
                                head_dim_v=512, out=attune.Spec((2, 16, 512), "bfloat16"), capability=(9, 0))
        assert re.search("lacks (.*; )?KV format: e4m3", step.reason), step
    monkeypatch.delenv("ATTUNE_KERNEL")
    from contract_mla import MlaEngine

    assert not MlaEngine(kv_cache_dtype="fp8").layers[0].impl.supports_quant_query_input
