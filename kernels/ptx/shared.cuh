// SPDX-License-Identifier: Apache-2.0
// Loads from shared memory by 32-bit address. PTX ISA, "ld.shared".
#pragma once

namespace attune::ptx {

__device__ __forceinline__ float load_shared(unsigned at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ float2 load_shared_pair(unsigned at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}

}  // namespace attune::ptx
