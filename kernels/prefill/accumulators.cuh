// SPDX-License-Identifier: Apache-2.0
// What a math thread has of its two rows while a work tile runs, and of their outputs afterwards.
#pragma once

#include "prefill/rows.cuh"

namespace attune::prefill {

struct Accumulators {
  // Of row h, pair i of channels: first_of_pair(i, ..) and the next one, at o[pair_at(h, i)] and kPairStep further.
  static constexpr int kPairs = Config::kChannels / 8, kPairStep = Config::kFp8 ? 4 : 1;
  float o[Config::kChannels / 2];
  // max: of products where Rows::kProducts, else of scores in base 2, as it is afterwards everywhere; it may be that of
  // this thread's keys. sum: of this thread's keys. o and sum are taken against `reference`, in base 2, while a work
  // tile runs, against `max` afterwards.
  float row_max[2], row_max_ref[2], row_sum[2];
  float o_scale[2];  // of o, at the work tile's end
  // a maximum up to which the reference need not follow; NaN: there is no row
  float row_max_limit[Rows::kCapped ? 2 : 1];

  // Transposed codes have their channels in an order of their own (transpose_v.cuh).
  __device__ __forceinline__ static constexpr int pair_at(int h, int i) {
    return Config::kFp8 ? i / 2 * 8 + 2 * h + i % 2 : 4 * i + 2 * h;
  }
  // pair: twice the lane, of four.
  __device__ __forceinline__ static constexpr int first_of_pair(int i, int pair) {
    return Config::kFp8 ? i / 2 * 16 + i % 2 * 2 + 2 * pair : 8 * i + pair;
  }
};

}  // namespace attune::prefill
