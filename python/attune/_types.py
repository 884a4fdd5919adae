# SPDX-License-Identifier: Apache-2.0
"""Types of the keyword arguments, for type checkers only. `attention` says what they mean."""

from __future__ import annotations

from typing import Literal, TypedDict, TypeVar

from ._records import Array, KVCache, Prologue

ArrayT = TypeVar("ArrayT", bound=Array)  # the results are of q's framework
RopeStyle = Literal["none", "linear", "glm2", "dynamic_ntk", "qwen_dynamic_ntk", "yarn", "llama3", "mrope"]


class AttentionInputs(TypedDict, total=False):
    """Without the outputs that make `attention` return a tuple."""

    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None
    cache: KVCache | None
    seqused_kv: Array | None
    indices: Array | None
    topk_length: Array | None
    extra_cache: KVCache | None
    extra_indices: Array | None
    extra_topk_length: Array | None
    cache_indirection: Array | None
    beam_prompt_length: Array | None
    beam_width: int | None
    causal: bool | None
    window_left: int | None
    window_right: int | None
    mask_bits: Array | None
    mask_start: Array | None
    bidirectional_ranges: Array | None
    finished: Array | None
    skip_decode: bool | None
    zero_finished: bool | None
    softmax_scale: float | None
    softcap: float | None
    alibi_slopes: Array | None
    alibi_sqrt: bool | None
    bias: Array | None
    new_token_bias: Array | None
    t5_bias: Array | None
    t5_max_distance: int | None
    t5_bidirectional: bool | None
    sinks: Array | None
    prologue: Prologue | None
    out: Array | None
    out_scale: Array | None
    head_dim_v: int | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    batch_invariant: bool | None
    allow_tf32: bool | None


class AttentionFields(AttentionInputs, total=False):
    lse: Array | None
    max_logits: Array | None


class PlanChanges(AttentionFields, total=False):
    q: Array
    k: Array | None
    v: Array | None
    stream: object


class RopeFields(TypedDict, total=False):
    theta: float
    scale: float
    max_position: int
    seqlen: int
    beta_fast: float
    beta_slow: float
    extrapolation_factor: float
    mscale: float
    low_freq_factor: float
    high_freq_factor: float
