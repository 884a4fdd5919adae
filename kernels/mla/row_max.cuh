// SPDX-License-Identifier: Apache-2.0
// The running row_max of the online softmax, and row_max_ref, relative to which exponents are taken.
#pragma once

#include "common/row_max.cuh"
#include "ptx/math.cuh"

namespace attune::mla {

using common::finite_row_max;

// Folds in a tile's row max. Returns the rescale factor for O and row_sum, which is 1 unless row_max_ref is raised.
__device__ __forceinline__ float update_row_max(float tile_max, float c, float& row_max, float& row_max_ref) {
  constexpr float kRescaleThreshold = 8;  // P may reach 2^8 before O is rescaled
  row_max = fmaxf(row_max, tile_max);
  if (!((row_max - row_max_ref) * c > kRescaleThreshold)) return 1.0f;
  const float rescale = ptx::exp2_approx((row_max_ref - row_max) * c);
  row_max_ref = row_max;
  return rescale;
}

}  // namespace attune::mla
