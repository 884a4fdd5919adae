// SPDX-License-Identifier: Apache-2.0
// The state of a consumer thread's two rows: O, row_max and row_sum.
#pragma once

#include "prefill/mask.cuh"

namespace attune::prefill {

struct Accumulators {
  // Channels first_of_pair(i, ..) and the next of O's row h are o[pair_at(h, i)] and the element kPairStep after it.
  static constexpr int kPairs = Config::kChannels / 8, kPairStep = Config::kFp8 ? 4 : 1;
  float o[Config::kChannels / 2];
  // row_max is of unscaled products if Rows::kProducts, otherwise of scores in base 2; after the mainloop it is always
  // in base 2. Like row_sum it may cover this thread's keys only. During the mainloop o and row_sum are relative to
  // 2^row_max_ref, after it to 2^row_max.
  float row_max[2], row_max_ref[2], row_sum[2];
  float o_scale[2];  // the factor of o after the mainloop
  // row_max_ref is updated when row_max is above this. NaN marks a padding row.
  float row_max_limit[Rows::kCapped ? 2 : 1];

  // fp8: transpose_v.cuh permutes the channels of V.
  __device__ __forceinline__ static constexpr int pair_at(int h, int i) {
    return Config::kFp8 ? i / 2 * 8 + 2 * h + i % 2 : 4 * i + 2 * h;
  }
  // pair: twice the lane's number within its quad.
  __device__ __forceinline__ static constexpr int first_of_pair(int i, int pair) {
    return Config::kFp8 ? i / 2 * 16 + i % 2 * 2 + 2 * pair : 8 * i + pair;
  }
};

}  // namespace attune::prefill
