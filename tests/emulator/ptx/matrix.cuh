// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/matrix.cuh on the CPU.
#pragma once

#include "ptx/shared.cuh"

namespace attune::ptx {

inline void load_matrix_x4(unsigned (&d)[4], unsigned shared) { emulator::load_matrices({d, shared, 4, false}); }
inline void load_matrix_x2(unsigned (&d)[2], unsigned shared) { emulator::load_matrices({d, shared, 2, false}); }
inline void load_matrix_x4_transposed(unsigned (&d)[4], unsigned shared) {
  emulator::load_matrices({d, shared, 4, true});
}
inline void load_matrix_x2_transposed(unsigned (&d)[2], unsigned shared) {
  emulator::load_matrices({d, shared, 2, true});
}
inline void store_matrix_x4(unsigned shared, const unsigned (&d)[4]) {
  emulator::store_matrices({const_cast<unsigned*>(d), shared, 4, false});
}
inline void store_matrix_x4_transposed(unsigned shared, const unsigned (&d)[4]) {
  emulator::store_matrices({const_cast<unsigned*>(d), shared, 4, true});
}

inline unsigned transpose_matrix(unsigned a) {
  const uint64_t* all = emulator::exchange(a);
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto element = [&](unsigned row, unsigned column) {
    return static_cast<unsigned>(all[4 * row + column / 2] >> column % 2 * 16 & 0xffff);
  };
  return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emulator::multiply_fragments({c, a, b, emulator::Format::kBf16});
}
inline void mma_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emulator::multiply_fragments({c, a, b, emulator::Format::kF16});
}
inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emulator::multiply_fragments({c, a, b, emulator::Format::kTf32});
}

}  // namespace attune::ptx
