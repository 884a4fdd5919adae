// SPDX-License-Identifier: Apache-2.0
// Scores in base 2 of products <q, k>, and their slopes with respect to the products.
#pragma once

#include "backward/rows.cuh"
#include "common/kinds.h"
#include "common/row_max.cuh"
#include "common/score_terms.cuh"
#include "common/softcap.cuh"

namespace attune::backward {

constexpr bool kSoftcap = (ATTUNE_SCORE & use::kSoftcap) != 0, kAlibiSqrt = (ATTUNE_SCORE & use::kAlibiSqrt) != 0;
constexpr bool kAlibi = kAlibiSqrt || (ATTUNE_SCORE & use::kAlibi) != 0;
// Biases and T5, which are looked up pair by pair.
constexpr bool kTables = (ATTUNE_SCORE & use::kTables) != 0;

struct Score {
  float value;
  float slope;  // 1 - (value / cap)^2; 1 without a softcap
};

// unit: from a product to a score; with a softcap, to y = x / cap, whose score is level tanh(y).
struct Scores {
  float unit, level;

  __device__ __forceinline__ explicit Scores(const BackwardParams& p)
      : unit(p.scale * (kSoftcap ? p.cap_inverse : common::kLog2e)), level(kSoftcap ? p.cap_level : 0.0f) {}

  // With r = 1 / (1 + e^2|y|) the slope, 1 - tanh(y)^2, is 4 r (1 - r), which keeps its bits where it is small. r is
  // computed once, for tanh too.
  __device__ __forceinline__ Score of(float product) const {
    const float y = product * unit;
    if constexpr (!kSoftcap) return {y, 1.0f};
    const float size = fabsf(y);
    const float r = ptx::reciprocal_approx(1.0f + ptx::exp2_approx(size * (2 * common::kLog2e)));
    return {copysignf(common::capped_score(size, level), y), fmaf(-4.0f * r, r, 4.0f * r)};
  }
};

// The slope of ALiBi in base 2; 0 without ALiBi.
__device__ __forceinline__ float slope_of(const BackwardParams& p, int b, int head) {
  if constexpr (!kAlibi) return 0.0f;
  return p.alibi[b * p.alibi_batch_stride + head * p.alibi_head_stride] * common::kLog2e;
}
// Adds ALiBi. distance: from the key to the query.
__device__ __forceinline__ void add_alibi(Score& score, float slope, float distance) {
  if constexpr (kAlibiSqrt) distance = ptx::sqrt_approx(fmaxf(distance, 0.0f));
  if constexpr (kAlibi) score.value = fmaf(-slope, distance, score.value);
}

// Adds the terms of the tables for a pair.
__device__ __forceinline__ void add_tables(Score& score, const BackwardParams& p, const SequenceInfo& s, int head,
                                           int row, int key) {
  if constexpr (kTables) {
    const int first_position = s.num_keys - s.num_q;
    score.value += common::table_terms<ATTUNE_SCORE>(p, head, row, first_position, key, first_position + row - key) *
                   common::kLog2e;
  }
}

// 2^(score - lse), which is P but for a sink. A bias of -1e10 on all keys leaves more between a score and its rounded
// lse than a power of two can hold: P of such a row is at most 1.
__device__ __forceinline__ float weight_of(float score, float lse2) {
  const float x = score - lse2;
  return ptx::exp2_approx(kTables && x > 0.0f && common::is_large(lse2) ? 0.0f : x);
}

}  // namespace attune::backward
