// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/matrix.cuh on the CPU, as far as kernels with emulated tests use it.
#pragma once

#include "ptx/shared.cuh"

namespace attune::ptx {

inline void load_matrix_x4_transposed(unsigned (&d)[4], unsigned shared) {
  const unsigned lane = threadIdx.x % 32;
  const uint64_t* rows = emulator::exchange(shared);
  for (unsigned i = 0; i < 4; ++i) {
    d[i] = 0;
    for (unsigned e = 0; e < 2; ++e)
      d[i] |=
          static_cast<unsigned>(load_shared_u16(static_cast<unsigned>(rows[8 * i + 2 * (lane % 4) + e]) + lane / 4 * 2))
          << (16 * e);
  }
}

inline void store_matrix_x4(unsigned shared, const unsigned (&d)[4]) {
  const unsigned lane = threadIdx.x % 32;
  const uint64_t* rows = emulator::exchange(shared);
  for (unsigned i = 0; i < 4; ++i) store_shared_u32(static_cast<unsigned>(rows[8 * i + lane / 4]) + lane % 4 * 4, d[i]);
}

}  // namespace attune::ptx
