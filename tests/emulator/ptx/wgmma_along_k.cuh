// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/wgmma_along_k.cuh on the CPU.
#pragma once

#include "ptx/wgmma.cuh"

namespace attune::ptx {

template <int kN, Type kType>
struct ProductAlongK {
  template <class B>
  static void registers(float (&d)[kN / 2], const unsigned* a, B b, int accumulate) {
    using Whole = Product<kN, kType>;
    const unsigned quad = threadIdx.x % 32 & ~3u;
    float rows[2][16];
    for (int i = 0; i < 4; ++i) {  // register i: row i % 2, K from 8 (i / 2) on
      const uint64_t* all = emulator::exchange(a[i]);
      for (unsigned k = 0; k < 8; ++k) {
        const auto x = static_cast<unsigned short>(all[quad + k / 2] >> (16 * (k % 2)));
        rows[i % 2][8 * (static_cast<unsigned>(i) / 2) + k] = kType == Type::kBf16 ? bf16_to_float(x) : f16_to_float(x);
      }
    }
    Whole::multiply(d, rows, accumulate, [&](int k, int n) { return Whole::along_k(b.bits(), n, k); });
  }
};

}  // namespace attune::ptx
