// SPDX-License-Identifier: Apache-2.0
// Prefix sums for the schedule kernels.
#pragma once

namespace attune::scheduler {

// The sum of x over this lane and all lanes before it.
__device__ __forceinline__ long long inclusive_sum_of_warp(long long x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long other = __shfl_up_sync(0xffffffffu, x, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) x += other;
  }
  return x;
}

}  // namespace attune::scheduler
