// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/wgmma_codes.cuh on the CPU. Sums are fp32, which the tensor cores' are not quite.
#pragma once

#include "ptx/wgmma.cuh"

namespace attune::ptx {

template <int kN>
struct ProductOfCodes {
  using Layout = Product<kN, Type::kF16>;  // of descriptors
  static float along_k(Descriptor d, int row, int k) {
    return emulator::from_e4m3(
        *shared_pointer(swizzled(Layout::start(d) + row / 8 * Layout::strided(d) + row % 8 * 128 + k)));
  }

  // a: [2][32], the two rows of the thread.
  static void multiply(float (&d)[kN / 2], const float (&a)[2][32], int accumulate, Descriptor b) {
    const int t = threadIdx.x % 4;
    for (int j = 0; j < kN / 8; ++j) {
      for (int e = 0; e < 2; ++e) {
        float sum[2] = {0, 0};
        for (int k = 0; k < 32; ++k) {
          const float x = along_k(b, 8 * j + 2 * t + e, k);
          sum[0] += a[0][k] * x;
          sum[1] += a[1][k] * x;
        }
        for (int h = 0; h < 2; ++h) {
          float& to = d[4 * j + 2 * h + e];
          to = accumulate != 0 ? to + sum[h] : sum[h];
        }
      }
    }
  }

  static void shared(float (&d)[kN / 2], Descriptor a, Descriptor b, int accumulate) {
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    float rows[2][32];
    for (int h = 0; h < 2; ++h) {
      for (int k = 0; k < 32; ++k) rows[h][k] = along_k(a, row + 8 * h, k);
    }
    multiply(d, rows, accumulate, b);
  }

  static void registers(float (&d)[kN / 2], const unsigned* a, Descriptor b, int accumulate) {
    const unsigned quad = threadIdx.x % 32 & ~3u;
    float rows[2][32];
    for (int i = 0; i < 4; ++i) {  // register i: row i % 2, K from 16 (i / 2) on
      const uint64_t* all = emulator::exchange(a[i]);
      for (unsigned k = 0; k < 16; ++k)
        rows[i % 2][16 * (static_cast<unsigned>(i) / 2) + k] =
            emulator::from_e4m3(static_cast<uint8_t>(all[quad + k / 4] >> (8 * (k % 4))));
    }
    multiply(d, rows, accumulate, b);
  }
};

}  // namespace attune::ptx
