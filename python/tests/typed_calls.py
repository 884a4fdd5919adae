# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows of calls: read by mypy --strict (test_surface.py), never run. A "type: ignore" that nothing needs is an
error there, so each of them says that the line is one."""

from typing_extensions import assert_type

import jax
import numpy
import torch

import attune
from attune.compat import flash_attn, flash_attn_interface, flash_mla
from attune.integrations import torch_flash
from attune.integrations.jax import attention as jax_attention


class Tensor:
    """Of some framework."""

    shape: tuple[int, ...]
    dtype: str


def results(q: Tensor, k: Tensor, flag: bool) -> None:
    assert_type(attune.attention(q, k, k, causal=True), Tensor)
    assert_type(attune.attention(q, k, k, out=q, softmax_scale=0.5), Tensor)
    assert_type(attune.attention(q, k, k, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attune.attention(q, k, k, return_lse=True, return_max_logits=True), tuple[Tensor, Tensor, Tensor])
    assert_type(attune.attention(q, k, k, return_lse=flag), Tensor | tuple[Tensor, ...])
    assert_type(attune.attention(q, k, k, lse=k), Tensor | tuple[Tensor, ...])
    assert_type(attune.merge(q, k), Tensor)
    assert_type(attune.merge(q, k, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attune.indexer_topk(q, k, attune.KVCache(k), topk=4), tuple[Tensor, Tensor])
    assert_type(bool(attune.supported(attune.Spec((3, 2, 64), "bfloat16"), k, k)), bool)
    assert_type(attune.rope_frequencies(64, theta=5e5), list[float])
    assert_type(attune.rope_table(8, 64, like=q), Tensor)
    assert_type(attune.alibi_slopes(8, like=q), Tensor)
    assert_type(attune.logn_table(64, 128, like=q), Tensor)


def results_of_cache_operations(q: Tensor, k: Tensor, cache: attune.KVCache, maybe: Tensor | None) -> None:
    prologue = attune.Prologue(rope_offset=1)
    assert_type(attune.qkv_prepare(q, k, k, prologue=prologue), tuple[Tensor, Tensor, Tensor])
    assert_type(attune.qkv_prepare(q, prologue=prologue, out_dtype="bfloat16"), tuple[Tensor, None, None])
    assert_type(attune.qkv_prepare(q, k, prologue=prologue), tuple[Tensor, Tensor, None])
    assert_type(attune.qkv_prepare(k=k, v=k, prologue=prologue, cache=cache), tuple[None, Tensor, Tensor])
    assert_type(attune.qkv_prepare(maybe, k, prologue=prologue), tuple[Tensor | None, Tensor | None, Tensor | None])
    assert_type(attune.cache_dequantize(cache, k), Tensor)
    assert_type(attune.cache_dequantize(cache, k, k), tuple[Tensor, Tensor])
    assert_type(attune.cache_gather(cache, k, slots=k), Tensor)
    assert_type(attune.cache_gather(cache, k, k, slots=k), tuple[Tensor, Tensor])


def results_of_tables() -> None:
    """Without `like` they are arrays of numpy."""
    assert_type(attune.rope_table(8, 64), numpy.typing.NDArray[numpy.float32])
    assert_type(attune.alibi_slopes(8), numpy.typing.NDArray[numpy.float32])
    assert_type(attune.logn_table(64, 128), numpy.typing.NDArray[numpy.float32])


def results_in_place_of_other_libraries(x: torch.Tensor, flag: bool) -> None:
    assert_type(flash_attn.flash_attn_func(x, x, x, 0.0, None, True), torch.Tensor)
    assert_type(flash_attn.flash_attn_func(x, x, x, return_attn_probs=True), tuple[torch.Tensor, torch.Tensor, None])
    assert_type(flash_attn.flash_attn_func(x, x, x, return_attn_probs=flag), torch.Tensor | tuple[torch.Tensor, torch.Tensor, None])
    assert_type(flash_attn.flash_attn_varlen_func(x, x, x, x, x, 1, 1, return_attn_probs=True), tuple[torch.Tensor, torch.Tensor, None])
    assert_type(flash_attn.flash_attn_with_kvcache(x, x, x, return_softmax_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(flash_attn.flash_attn_qkvpacked_func(x, causal=True), torch.Tensor)
    assert_type(flash_attn.flash_attn_kvpacked_func(x, x, return_attn_probs=True), tuple[torch.Tensor, torch.Tensor, None])
    assert_type(flash_attn.flash_attn_varlen_kvpacked_func(x, x, x, x, 1, 1), torch.Tensor)
    assert_type(flash_attn.flash_attn_varlen_qkvpacked_func(x, x, 1, return_attn_probs=True), tuple[torch.Tensor, torch.Tensor, None])
    assert_type(flash_attn_interface.flash_attn_func(x, x, x, causal=True), torch.Tensor)
    assert_type(flash_attn_interface.flash_attn_func(x, x, x, return_attn_probs=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(flash_attn_interface.flash_attn_qkvpacked_func(x, return_attn_probs=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(flash_attn_interface.flash_attn_varlen_func(x, x, x, x, x, 1, 1, return_attn_probs=flag),
                torch.Tensor | tuple[torch.Tensor, torch.Tensor])
    assert_type(flash_attn_interface.flash_attn_with_kvcache(x, x, x, return_softmax_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(flash_attn_interface.flash_attn_combine(x, x), tuple[torch.Tensor, torch.Tensor])
    assert_type(flash_attn_interface.get_scheduler_metadata(1, 1, 1, 1, 1, 1, x), torch.Tensor)
    assert_type(flash_mla.get_mla_metadata(), tuple[flash_mla.FlashMLASchedMeta, None])
    assert_type(flash_mla.get_mla_metadata(x, 1, 1), tuple[torch.Tensor, torch.Tensor])
    assert_type(torch_flash.varlen_attn(x, x, x, x, x, 1, 1), torch.Tensor)
    assert_type(torch_flash.varlen_attn_out(x, x, x, x, x, x, 1, 1), torch.Tensor)


def results_in_jax(x: jax.Array) -> None:
    assert_type(jax_attention(x, x, x, causal=True), jax.Array)
    assert_type(jax_attention(x, x, x, return_lse=True), tuple[jax.Array, jax.Array])


def mistakes(q: Tensor, x: torch.Tensor) -> None:
    attune.attention([1.0], q, q)  # type: ignore[call-overload]
    attune.attention(q, q, q, attn_mask=q)  # type: ignore[call-overload]
    attune.attention(q, q, q, window_left="4")  # type: ignore[call-overload]
    attune.KVCache(q, q, layout="nhdd")  # type: ignore[arg-type]
    attune.KVCache(q, q, format="mla_657")  # type: ignore[arg-type]
    attune.Spec((3, 2, 64), "bf16")  # type: ignore[arg-type]
    attune.rope_table(8, 64, style="llama")  # type: ignore[call-overload]
    attune.indexer_select(q, topk=4, form="slot")  # type: ignore[arg-type]
    attune.sdpa(x, x, x, is_casual=True)  # type: ignore[call-arg]
    flash_attn.flash_attn_func(x, x, x, softmax_scal=1.0)  # type: ignore[call-overload]
    flash_attn_interface.flash_attn_func(x, x, x, block_table=x)  # type: ignore[call-overload]
    flash_mla.flash_mla_with_kvcache(x, x, x, x, 512)  # type: ignore[call-arg]
    attune.cache_gather(q, q)  # type: ignore[call-overload]
    attune.attention(q, q, q).nothing  # type: ignore[attr-defined]
