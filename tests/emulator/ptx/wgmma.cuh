// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/wgmma.cuh on the CPU: products are done at once, by each thread for its own elements.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/math.cuh"
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

// Sums are fp32, which the tensor cores' of codes are not quite.
template <int kN, Type kType>
struct Product {
  static constexpr bool kCodes = kType == Type::kE4m3;
  static constexpr int kBytes = kCodes ? 1 : 2, kSteps = 32 / kBytes;  // of an element; elements along K

  static float number(unsigned bits) {
    if (kCodes) return emulator::from_e4m3(static_cast<uint8_t>(bits));
    const auto x = static_cast<unsigned short>(bits);
    return kType == Type::kBf16 ? bf16_to_float(x) : f16_to_float(x);
  }
  static float element(unsigned address, unsigned swizzle) {
    uint16_t x = 0;
    std::memcpy(&x, shared_pointer(swizzled(address, swizzle)), kBytes);
    return number(x);
  }
  // A descriptor's bits, and the fields in them.
  static unsigned start(uint64_t d) { return static_cast<unsigned>(d & 0x3fff) << 4; }
  static unsigned leading(uint64_t d) { return static_cast<unsigned>(d >> 16 & 0x3fff) << 4; }
  static unsigned strided(uint64_t d) { return static_cast<unsigned>(d >> 32 & 0x3fff) << 4; }
  static float along_k(uint64_t d, int row, int k) {
    const unsigned rows = start(d) + row / 8 * strided(d);
    switch (d >> 62) {
      case 0:  // 8 x 16 bytes, `leading` apart along K
        return element(rows + k * kBytes / 16 * leading(d) + row % 8 * 16 + k * kBytes % 16, 0);
      case 1:
        return element(rows + row % 8 * 128 + k * kBytes, 0x70);
      case 3:
        return element(rows + row % 8 * 32 + k * kBytes, 0x10);
      default:
        throw std::runtime_error("the emulator has no descriptors swizzled by 64 bytes");
    }
  }
  static float along_n(uint64_t d, int k, int n) {
    if (d >> 62 != 1) throw std::runtime_error("the emulator's operands along N are swizzled by 128 bytes");
    return element(start(d) + n / 64 * leading(d) + n % 64 * 2 + k / 8 * strided(d) + k % 8 * 128, 0x70);
  }

  // a: the two rows of the thread; b(k, n).
  template <class B>
  static void multiply(float (&d)[kN / 2], const float (&a)[2][kSteps], int accumulate, B&& b) {
    const int t = threadIdx.x % 4;
    for (int j = 0; j < kN / 8; ++j) {
      for (int e = 0; e < 2; ++e) {
        float sum[2] = {0, 0};
        for (int k = 0; k < kSteps; ++k) {
          const float x = b(k, 8 * j + 2 * t + e);
          sum[0] += a[0][k] * x;
          sum[1] += a[1][k] * x;
        }
        for (int h = 0; h < 2; ++h) {
          float& to = d[4 * j + 2 * h + e];
          to = as_on_device(accumulate != 0 ? to + sum[h] : sum[h]);
        }
      }
    }
  }

  template <class B>
  static void shared(float (&d)[kN / 2], Descriptor a, B b, int accumulate) {
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    float rows[2][kSteps];
    for (int h = 0; h < 2; ++h) {
      for (int k = 0; k < kSteps; ++k) rows[h][k] = along_k(a.bits(), row + 8 * h, k);
    }
    multiply(d, rows, accumulate, [&](int k, int n) { return along_k(b.bits(), n, k); });
  }

  static void registers(float (&d)[kN / 2], const unsigned* a, Descriptor b, int accumulate) {
    constexpr unsigned kOfWord = 4 / kBytes;  // elements
    const unsigned quad = threadIdx.x % 32 & ~3u;
    float rows[2][kSteps];
    for (unsigned i = 0; i < 4; ++i) {  // register i: row i % 2, the first or second half of K
      const uint64_t* all = emulator::exchange(a[i]);
      for (unsigned k = 0; k < kSteps / 2; ++k)
        rows[i % 2][kSteps / 2 * (i / 2) + k] =
            number(static_cast<unsigned>(all[quad + k / kOfWord] >> (8 * kBytes * (k % kOfWord))));
    }
    multiply(d, rows, accumulate, [&](int k, int n) { return kCodes ? along_k(b.bits(), n, k) : along_n(b.bits(), k, n); });
  }
};

}  // namespace attune::ptx
