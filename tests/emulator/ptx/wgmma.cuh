// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/wgmma.cuh on the CPU: products are done at once, by each thread for its own elements.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::ptx {

inline void fence_products() {}
inline void commit_products() {}
// A warp's lanes multiply each at its own time: after the wait all have.
template <int kPending>
void wait_products() {
  emulator::exchange(0);
}
template <class T, int kCount>
void pin(T (&)[kCount]) {}

template <int kN, Type kType>
struct Product {
  static float element(unsigned address) {
    uint16_t x;
    std::memcpy(&x, shared_pointer(swizzled(address)), 2);
    return kType == Type::kBf16 ? bf16_to_float(x) : f16_to_float(x);
  }
  static unsigned start(Descriptor d) { return static_cast<unsigned>(d.bits() & 0x3fff) << 4; }
  static unsigned leading(Descriptor d) { return static_cast<unsigned>(d.bits() >> 16 & 0x3fff) << 4; }
  static unsigned strided(Descriptor d) { return static_cast<unsigned>(d.bits() >> 32 & 0x3fff) << 4; }
  static float along_k(Descriptor d, int row, int k) {
    return element(start(d) + row / 8 * strided(d) + row % 8 * 128 + k * 2);
  }
  static float along_n(Descriptor d, int k, int n) {
    return element(start(d) + n / 64 * leading(d) + n % 64 * 2 + k / 8 * strided(d) + k % 8 * 128);
  }

  // a: [2][16], the two rows of the thread; b(k, n).
  template <class B>
  static void multiply(float (&d)[kN / 2], const float (&a)[2][16], int accumulate, B&& b) {
    const int t = threadIdx.x % 4;
    for (int j = 0; j < kN / 8; ++j) {
      for (int e = 0; e < 2; ++e) {
        float sum[2] = {0, 0};
        for (int k = 0; k < 16; ++k) {
          const float x = b(k, 8 * j + 2 * t + e);
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
    float rows[2][16];
    for (int h = 0; h < 2; ++h) {
      for (int k = 0; k < 16; ++k) rows[h][k] = along_k(a, row + 8 * h, k);
    }
    multiply(d, rows, accumulate, [&](int k, int n) { return along_k(b, n, k); });
  }

  static void registers(float (&d)[kN / 2], const unsigned* a, Descriptor b, int accumulate) {
    const unsigned quad = threadIdx.x % 32 & ~3u;
    float rows[2][16];
    for (int i = 0; i < 4; ++i) {  // register i: row i % 2, K from 8 (i / 2) on
      const uint64_t* all = emulator::exchange(a[i]);
      for (unsigned t = 0; t < 4; ++t) {
        for (unsigned e = 0; e < 2; ++e) {
          const auto x = static_cast<unsigned short>(all[quad + t] >> (16 * e));
          rows[i % 2][8 * (i / 2) + 2 * static_cast<int>(t + 0) + static_cast<int>(e)] =
              kType == Type::kBf16 ? bf16_to_float(x) : f16_to_float(x);
        }
      }
    }
    multiply(d, rows, accumulate, [&](int k, int n) { return along_n(b, k, n); });
  }
};

}  // namespace attune::ptx
