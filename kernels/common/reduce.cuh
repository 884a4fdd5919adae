// SPDX-License-Identifier: Apache-2.0
// Reductions over lanes of a warp: every lane gets the result, in an order that is always the same.
#pragma once

namespace attune::common {

// Over groups of kLanes neighbouring lanes.
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

// Over the quad of lanes that share the rows of an accumulator.
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

}  // namespace attune::common
