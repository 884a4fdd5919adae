// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/wgmma_along_k.cuh on the CPU.
#pragma once

#include "ptx/wgmma.cuh"

namespace attune::ptx {

template <int kN, Type kType>
struct WgmmaAlongK {
  template <class B>
  static void registers(float (&d)[kN / 2], const unsigned* a, B b, int accumulate) {
    emulator::multiply({d, a, 0, b.bits(), kN, accumulate, format_of(kType), false});
  }
};

}  // namespace attune::ptx
