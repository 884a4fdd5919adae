// SPDX-License-Identifier: Apache-2.0
// The QK GEMM of a tile.
#pragma once

#include "prefill/shared_storage.cuh"
#include "ptx/wgmma.cuh"

namespace attune::prefill {

// Offset of the operands of k-step i, in units of 16 bytes. A line of 128 bytes has 64 channels of 16 bits, or 128 of
// fp8. x-packed K is not swizzled.
__device__ __forceinline__ constexpr int step_offset(int i, int rows) {
  return i / 4 * (rows * 8) + i % 4 * ptx::kStepK;
}
__device__ __forceinline__ int k_step_offset(ptx::Descriptor, int i) { return step_offset(i, Config::kKeys); }
template <unsigned kHigh>
__device__ __forceinline__ int k_step_offset(ptx::DescriptorOf<kHigh>, int i) {
  return i * ptx::kStepKNoSwizzle;
}

// Issues S = Q K^T of a warpgroup's 64 rows and a tile.
template <class Wgmma, class KDescriptor>
__device__ __forceinline__ void qk_gemm(ptx::Descriptor q, KDescriptor k, float (&s)[Config::kKeys / 2]) {
  ptx::fence_operand(s);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kQkSteps; ++i) {
    Wgmma::ss(s, q + step_offset(i, Config::kRows), k + k_step_offset(k, i), i == 0 ? 0 : 1);
  }
  ptx::wgmma_commit();
}

}  // namespace attune::prefill
