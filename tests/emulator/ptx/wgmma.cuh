// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/wgmma.cuh on the CPU: products are done at once.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/math.cuh"
#include "ptx/tensor_copy.cuh"

static_assert(__CUDA_ARCH__ >= 900, "a kernel for older GPUs includes this");

namespace attune::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::wgmma_commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::wgmma_wait(kPending);
}
template <class T, int kCount>
void fence_operand(T (&)[kCount]) {}

constexpr emulator::Format format_of(Type type) {
  return type == Type::kE4m3   ? emulator::Format::kE4m3
         : type == Type::kBf16 ? emulator::Format::kBf16
                               : emulator::Format::kF16;
}

// Sums are fp32, which the tensor cores' of codes are not quite.
template <int kN, Type kType>
struct Wgmma {
  template <class B>
  static void ss(float (&d)[kN / 2], Descriptor a, B b, int accumulate) {
    emulator::multiply({d, nullptr, a.bits(), b.bits(), kN, accumulate, format_of(kType), false});
  }
  static void rs(float (&d)[kN / 2], const unsigned* a, Descriptor b, int accumulate) {
    emulator::multiply({d, a, 0, b.bits(), kN, accumulate, format_of(kType), kType != Type::kE4m3});
  }
};

template <int kN, Type kType>
struct WgmmaBMnMajor {
  static void ss(float (&d)[kN / 2], Descriptor a, Descriptor b, int accumulate) {
    emulator::multiply({d, nullptr, a.bits(), b.bits(), kN, accumulate, format_of(kType), true});
  }
};

template <int kN, Type kType>
struct WgmmaAMnMajor {
  static void ss(float (&d)[kN / 2], Descriptor a, Descriptor b, int accumulate) {
    emulator::multiply({d, nullptr, a.bits(), b.bits(), kN, accumulate, format_of(kType), false, true});
  }
};

template <int kN, Type kType>
struct WgmmaBKMajor {
  template <class B>
  static void rs(float (&d)[kN / 2], const unsigned* a, B b, int accumulate) {
    emulator::multiply({d, a, 0, b.bits(), kN, accumulate, format_of(kType), false});
  }
};

}  // namespace attune::ptx
