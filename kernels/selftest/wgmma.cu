// SPDX-License-Identifier: Apache-2.0
// Both GEMMs of attention by one warpgroup: S = Q K^T with both operands in shared memory, and O = P V with P, which is
// S rounded, in registers. q [64, 64], k [KEYS, 64], v [KEYS, CHANNELS] in bf16, by TMA.
#include "selftest/products.cuh"

// s [64, KEYS], o [64, CHANNELS]
extern "C" __global__ void __launch_bounds__(128, 1)
    multiply(const __grid_constant__ attune::ptx::TensorMap q, const __grid_constant__ attune::ptx::TensorMap k,
             const __grid_constant__ attune::ptx::TensorMap v, float* s, float* o) {
  using namespace attune;
  constexpr int kBlocks = (CHANNELS + 63) / 64;
  const unsigned at_q = ptx::shared_address(ptx::dynamic_shared()), at_k = at_q + 64 * 128, at_v = at_k + KEYS * 128,
                 barrier = at_v + kBlocks * KEYS * 128;
  multiply_and_store(
      barrier, (64 + KEYS + kBlocks * KEYS) * 128, s, o,
      [&] {
        ptx::tma_load(at_q, q, barrier, 0, 0, 0, 0);
        ptx::tma_load(at_k, k, barrier, 0, 0, 0, 0);
        for (int i = 0; i < kBlocks; ++i) ptx::tma_load(at_v + i * KEYS * 128, v, barrier, 64 * i, 0, 0, 0);
      },
      [&](float (&d)[KEYS / 2], int i) {
        ptx::Wgmma<KEYS, ptx::Type::kBf16>::ss(d, ptx::descriptor_k_major(at_q) + i * ptx::kStepK,
                                               ptx::descriptor_k_major(at_k) + i * ptx::kStepK, i == 0 ? 0 : 1);
      },
      [&](float (&e)[CHANNELS / 2], const unsigned* p, int i) {
        ptx::Wgmma<CHANNELS, ptx::Type::kBf16>::rs(
            e, p, ptx::descriptor_mn_major(at_v, KEYS * 128) + i * (2 * ptx::kBytesOfEightRows >> 4), i == 0 ? 0 : 1);
      });
}
