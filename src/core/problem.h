// SPDX-License-Identifier: Apache-2.0
// attune_attention, checked and normalised. Every kernel, on every device, starts from this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attune/attune.h"
#include "common/key_masks.h"
#include "common/kinds.h"
#include "core/kv_cache.h"
#include "core/prologue.h"
#include "core/tensor.h"

namespace attune {

inline constexpr int64_t kMaxHeadDim = 576;

// One pool of slots chosen by index.
struct SparseList {
  const int32_t* indices = nullptr;
  int64_t topk = 0;
  int64_t rows_per_batch = 0;  // 0: one flat axis of rows
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0, entry_stride = 0;
  IntView length;              // not given: topk
  bool length_by_row = false;  // [total_q] rather than [batch]

  int32_t at(int64_t row, int64_t head, int64_t i) const {
    const int64_t base = rows_per_batch == 0
                             ? row * row_stride
                             : (row / rows_per_batch) * batch_stride + (row % rows_per_batch) * row_stride;
    return indices[base + head * head_stride + i * entry_stride];
  }
  int64_t used(int64_t row, int64_t batch) const {
    if (!length) return topk;
    return std::clamp<int64_t>(length(length_by_row ? row : batch), 0, topk);
  }
};

// Where one sequence's queries and keys are, after clamping what the tables say.
struct Sequence {
  int64_t q_begin = 0, num_q = 0;  // rows of q
  int64_t kv_begin = 0;            // first dense row of k (new tokens: their rows are those of q)
  int64_t num_cached = 0;  // keys in the cache; in a ring the count, of which the last ring_capacity are retained
  int64_t num_dense = 0;   // dense keys: all of them, or the new tokens
  int64_t seqlen_kv() const { return num_cached + num_dense; }
  int64_t position(int64_t i) const { return seqlen_kv() - num_q + i; }  // absolute position of query i
};

struct Problem {
  int64_t batch = 0, total_q = 0, heads_q = 0, heads_kv = 0, group = 1, head_dim_qk = 0, head_dim_v = 0;
  int64_t max_seqlen_q = 0, max_seqlen_kv = 0;

  RowView q, k, v;                    // v repeats k where V aliases K
  RowView q_rope;                     // the last channels of the queries, where they are apart from those in q
  int64_t dim_q = 0, dim_q_rope = 0;  // channels in q and in q_rope: head_dim_qk together
  bool v_aliases_k = false;
  IntView cu_q, cu_kv, seqused;
  int64_t fixed_q = 0, fixed_kv = 0;  // queries and keys of each sequence where there is no cu_seqlens
  bool dense_kv = false;              // k, v are all the keys
  bool new_tokens = false;            // k, v are the new tokens after the cache
  KvCache cache, extra_cache;
  bool sparse = false;
  SparseList list, extra_list;

  IntView cache_indirection, beam_prompt_length;
  int64_t beam_width = 1;

  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  KeyMasks key_masks;
  const int32_t* ranges = nullptr;
  bool has_ranges = false;
  int64_t num_ranges = 0, range_batch_stride = 0, range_stride = 0, range_end_stride = 0;
  bool has_finished = false;
  const uint8_t* finished = nullptr;
  int64_t finished_stride = 0;
  bool skip_decode = false, zero_finished = false;
  bool scheduled_before = false;  // the workspace has the schedule, from an earlier call

  float scale = 0, softcap = 0;
  ParamView alibi;
  bool alibi_per_batch = false, alibi_sqrt = false;
  ParamView bias, new_token_bias, t5_bias, sinks;
  int64_t t5_num_buckets = 0, t5_max_distance = 0;
  bool t5_bidirectional = false;

  Prologue prologue;

  RowView out, lse, max_logits;
  const float* out_scale = nullptr;
  bool batch_invariant = false, allow_tf32 = false;

  // What the descriptor uses, of use::Masks and use::Scores (kernels/common/kinds.h).
  uint32_t mask_kinds() const {
    return key_masks.kinds() | (causal ? use::kCausal : 0u) |
           (window_left >= 0 || window_right >= 0 ? use::kWindow : 0u) | (has_ranges ? use::kRanges : 0u) |
           (has_finished ? use::kFinished : 0u) | (skip_decode ? use::kSkipDecode : 0u);
  }
  uint32_t score_kinds() const {
    return (softcap > 0 ? use::kSoftcap : 0u) | (alibi ? (alibi_sqrt ? use::kAlibiSqrt : use::kAlibi) : 0u) |
           (bias ? use::kBias : 0u) | (new_token_bias ? use::kNewTokenBias : 0u) | (t5_bias ? use::kT5 : 0u) |
           (sinks ? use::kSinks : 0u);
  }
  // True if anything but the plain scale changes the scores.
  bool has_score_terms() const { return softcap > 0 || alibi || bias || new_token_bias || t5_bias; }
  bool is_finished(int64_t b) const { return finished != nullptr && finished[b * finished_stride] != 0; }
  // The keys [first, last] that causality and windows let a query at absolute position p see.
  int64_t first_visible(int64_t p) const { return window_left >= 0 ? std::max<int64_t>(0, p - window_left) : 0; }
  int64_t last_visible(int64_t p) const {
    int64_t last = int64_t{1} << 60;  // any key; far from overflow
    if (causal) last = p;
    if (window_right >= 0 && p + window_right < last) last = p + window_right;
    return last;
  }
};

// Throws INVALID_ARGUMENT for anything wrong. kOptional: data pointers may be null (planning).
Problem make_problem(const attune_attention& a, Data data);
// The sequences in order; cu_seqlens are clamped to be within the tensors and not to decrease. out has problem.batch
// entries.
void make_sequences(const Problem& p, Sequence* out);
// Reads lengths, tables and indices; throws BAD_DATA naming the first wrong entry.
void validate_contents(const Problem& p);

}  // namespace attune
