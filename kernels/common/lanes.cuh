// SPDX-License-Identifier: Apache-2.0
// Reductions and exchanges over the lanes of a warp. Every lane gets the result, and the order of the additions is
// fixed.
#pragma once

namespace attune::common {

// Reduces over groups of kLanes neighbouring lanes.
template <int kLanes = 32>
__device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
template <int kLanes = 32>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Reduces over the quad of lanes that share the rows of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
template <class Int>
__device__ __forceinline__ Int quad_max(Int x) {
  x = max(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return max(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transposes a 4 x 4 matrix over four lanes: r[i] of lane t becomes r[t] of lane i.
__device__ __forceinline__ void transpose_quad(unsigned (&r)[4]) {
  const bool odd = threadIdx.x % 2 != 0, upper = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? r[i] : r[i + 1], 1);
    if (odd) {
      r[i] = got;
    } else {
      r[i + 1] = got;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? r[i] : r[i + 2], 2);
    if (upper) {
      r[i] = got;
    } else {
      r[i + 2] = got;
    }
  }
}

}  // namespace attune::common
