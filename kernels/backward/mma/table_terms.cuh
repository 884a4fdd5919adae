// SPDX-License-Identifier: Apache-2.0
// What the bias tables add to the scores of a step, looked up before it is needed.
#pragma once

#include "backward/mma/softmax.cuh"

namespace attune::backward::mma {

// Loads terms of the bias table. There is no branch between the loads, so that their latencies overlap.
template <int kDtype>
__device__ __forceinline__ void load_bias(const BackwardParams& p, const WorkTile& w, unsigned pairs, int head, int key,
                                          Scores& terms) {
  const int first_position = w.s.num_keys - w.s.num_q, first_key = key + first_column();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int position = first_position + resident_row(w) + 8 * h;
    const bool in_rows = 0 <= position && position < p.bias.rows;
    const char* const row = p.bias.data + head * p.bias.head_stride + (in_rows ? position : 0) * p.bias.row_stride;
#pragma unroll
    for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = first_key + 8 * n + e;
        const bool there = in_rows && column < p.bias.columns && (pairs >> (4 * n + 2 * h + e) & 1) != 0;
        // An entry that does not exist gets the address of another one.
        const float x = common::load_element(kDtype, row + (there ? column : 0) * p.bias.column_stride, 0);
        terms[n][2 * h + e] = there ? x : 0.0f;
      }
    }
  }
}

// Loads the terms of the step whose keys begin at `key`; 0 if a query and a key do not see each other.
__device__ __forceinline__ void load_terms(const BackwardParams& p, const WorkTile& w, unsigned pairs, int head,
                                           int key, Scores& terms) {
#pragma unroll
  for (int i = 0; i < 4 * kN8Tiles; ++i) terms[i / 4][i % 4] = 0;
  if constexpr ((ATTUNE_SCORE & use::kBias) != 0) {
    if (p.bias.data != nullptr && p.bias.rows > 0 && p.bias.columns > 0) {
      if (p.bias.dtype == common::kFloat32) {
        load_bias<common::kFloat32>(p, w, pairs, head, key, terms);
      } else if (p.bias.dtype == common::kBFloat16) {
        load_bias<common::kBFloat16>(p, w, pairs, head, key, terms);
      } else {
        load_bias<common::kFloat16>(p, w, pairs, head, key, terms);
      }
    }
  }
  // The bias of new tokens and T5 are looked up as in other kernels.
  if ((ATTUNE_SCORE & use::kT5) == 0 && p.new_token_bias.data == nullptr) return;
  const int first_position = w.s.num_keys - w.s.num_q;
#pragma unroll
  for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((pairs >> (4 * n + j) & 1) == 0) continue;
      const int query = resident_row(w) + j / 2 * 8, at = key + 8 * n + first_column() + j % 2;
      terms[n][j] += common::bias_of(p.new_token_bias, 0, query, at - first_position);
      terms[n][j] += common::table_terms<ATTUNE_SCORE & ~use::kBias>(p, head, query, first_position, at,
                                                                      first_position + query - at);
    }
  }
}

}  // namespace attune::backward::mma
