// SPDX-License-Identifier: Apache-2.0
// Reductions of integers over a whole warp. PTX ISA, "redux.sync".
#pragma once

namespace attune::ptx {

__device__ __forceinline__ unsigned max_of_warp(unsigned x) {
  unsigned d;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(x));
  return d;
}
__device__ __forceinline__ unsigned min_of_warp(unsigned x) {
  unsigned d;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(x));
  return d;
}
__device__ __forceinline__ int sum_of_warp(int x) {
  int d;
  asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(x));
  return d;
}

}  // namespace attune::ptx
