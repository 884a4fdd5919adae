// SPDX-License-Identifier: Apache-2.0
// The GEMMs of selftest/wgmma.cu with K and V in the layout of x-packed pages: q [64, 64], k [8][KEYS][8] (eight
// channels of all keys, then the next eight), v [KEYS / 16][CHANNELS][16], in bf16, by TMA.
#include "selftest/products.cuh"

// s [64, KEYS], o [64, CHANNELS]
extern "C" __global__ void __launch_bounds__(128, 1)
    multiply_packed(const __grid_constant__ attune::ptx::TensorMap q, const __grid_constant__ attune::ptx::TensorMap k,
                    const __grid_constant__ attune::ptx::TensorMap v, float* s, float* o) {
  using namespace attune;
  const unsigned at_q = ptx::shared_address(ptx::dynamic_shared()), at_k = at_q + 64 * 128, at_v = at_k + KEYS * 128,
                 barrier = at_v + CHANNELS * KEYS * 2;
  multiply_and_store(
      barrier, (64 + KEYS + CHANNELS * KEYS / 64) * 128, s, o,
      [&] {
        ptx::tma_load(at_q, q, barrier, 0, 0, 0, 0);
        ptx::tma_load(at_k, k, barrier, 0, 0, 0, 0, 0);
        ptx::tma_load(at_v, v, barrier, 0, 0, 0, 0, 0);
      },
      [&](float (&d)[KEYS / 2], int i) {
        ptx::Wgmma<KEYS, ptx::Type::kBf16>::ss(d, ptx::descriptor_k_major(at_q) + i * ptx::kStepK,
                                               ptx::descriptor_no_swizzle<8 * 128>(at_k) + i * ptx::kStepKNoSwizzle,
                                                     i == 0 ? 0 : 1);
      },
      [&](float (&e)[CHANNELS / 2], const unsigned* p, int i) {
        ptx::WgmmaBKMajor<CHANNELS, ptx::Type::kBf16>::rs(
            e, p, ptx::descriptor_swizzle_32b(at_v) + i * (CHANNELS * 32 >> 4), i == 0 ? 0 : 1);
      });
}
