// SPDX-License-Identifier: Apache-2.0
// The fields of attune_attention (attune.h) in their order, each with its kind. The table of tensors
// (src/core/tensor_fields.h), Python's binding, the fuzz target and the oracle on the GPU are made of this one list.
// Compiled by NVRTC and by the host's compiler; no standard headers.
//
// Kinds: Input and Output are tensors. Bits is an input whose bytes hold eight flags each. Cache is written where the
// operation appends; ReadCache is never written.
#pragma once

// The fields that say which keys are visible and what their scores are.
#define ATTUNE_ATTENTION_INPUTS(FIELD)  \
  FIELD(q, Input)                       \
  FIELD(cu_seqlens_q, Input)            \
  FIELD(k, Input)                       \
  FIELD(v, Input)                       \
  FIELD(cu_seqlens_kv, Input)           \
  FIELD(cache, Cache)                   \
  FIELD(seqused_kv, Input)              \
  FIELD(indices, Input)                 \
  FIELD(topk_length, Input)             \
  FIELD(extra_cache, ReadCache)         \
  FIELD(extra_indices, Input)           \
  FIELD(extra_topk_length, Input)       \
  FIELD(cache_indirection, Input)       \
  FIELD(beam_prompt_length, Input)      \
  FIELD(beam_width, Int32)              \
  FIELD(causal, Bool)                   \
  FIELD(window_left, Int64)             \
  FIELD(window_right, Int64)            \
  FIELD(mask_bits, Bits)                \
  FIELD(mask_start, Input)              \
  FIELD(bidirectional_ranges, Input)    \
  FIELD(finished, Input)                \
  FIELD(skip_decode, Bool)              \
  FIELD(zero_finished, Bool)            \
  FIELD(softmax_scale, Float)           \
  FIELD(softcap, Float)                 \
  FIELD(alibi_slopes, Input)            \
  FIELD(alibi_sqrt, Bool)               \
  FIELD(bias, Input)                    \
  FIELD(new_token_bias, Input)          \
  FIELD(t5_bias, Input)                 \
  FIELD(t5_max_distance, Int64)         \
  FIELD(t5_bidirectional, Bool)         \
  FIELD(sinks, Input)

// And those of later versions, at the end of the struct.
#define ATTUNE_ATTENTION_LATER_INPUTS(FIELD) FIELD(q_rope, Input)

#define ATTUNE_ATTENTION_FIELDS(FIELD)  \
  ATTUNE_ATTENTION_INPUTS(FIELD)        \
  FIELD(prologue, Prologue)             \
  FIELD(out, Output)                    \
  FIELD(out_scale, Input)               \
  FIELD(lse, Output)                    \
  FIELD(max_logits, Output)             \
  FIELD(head_dim_v, Int64)              \
  FIELD(max_seqlen_q, Int64)            \
  FIELD(max_seqlen_kv, Int64)           \
  FIELD(batch_invariant, Bool)          \
  FIELD(allow_tf32, Bool)               \
  ATTUNE_ATTENTION_LATER_INPUTS(FIELD)
