// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/matrix.cuh on the CPU.
#pragma once

#include <stdexcept>

#include "ptx/shared.cuh"

namespace attune::ptx {

// Lane 8i + r gives the address of row r of matrix i; element (r, c) of matrix i goes to lane 4r + c / 2, or transposed
// to lane 4c + r / 2.
template <int kCount, bool kTransposed>
void load_matrices(unsigned (&d)[kCount], unsigned shared) {
  const uint64_t* rows = emulator::exchange(shared);
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (unsigned i = 0; i < kCount; ++i) {
    d[i] = 0;
    for (unsigned e = 0; e < 2; ++e) {
      const unsigned row = kTransposed ? 2 * t + e : g, column = kTransposed ? g : 2 * t + e;
      const auto at = static_cast<unsigned>(rows[8 * i + row]);
      if (at % 16 != 0) throw std::runtime_error("a row of a matrix is not aligned to 16 bytes");
      d[i] |= static_cast<unsigned>(load_shared_u16(at + 2 * column)) << 16 * e;
    }
  }
  emulator::exchange(0);  // the rows have been read
}
inline void load_matrix_x4(unsigned (&d)[4], unsigned shared) { load_matrices<4, false>(d, shared); }
inline void load_matrix_x2(unsigned (&d)[2], unsigned shared) { load_matrices<2, false>(d, shared); }
inline void load_matrix_x4_transposed(unsigned (&d)[4], unsigned shared) { load_matrices<4, true>(d, shared); }
inline void load_matrix_x2_transposed(unsigned (&d)[2], unsigned shared) { load_matrices<2, true>(d, shared); }

inline void store_matrix_x4(unsigned shared, const unsigned (&d)[4]) {
  const unsigned lane = threadIdx.x % 32;
  const uint64_t* rows = emulator::exchange(shared);
  for (unsigned i = 0; i < 4; ++i) store_shared_u32(static_cast<unsigned>(rows[8 * i + lane / 4]) + lane % 4 * 4, d[i]);
}

inline void store_matrix_x4_transposed(unsigned shared, const unsigned (&d)[4]) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint64_t* rows = emulator::exchange(shared);
  for (unsigned i = 0; i < 4; ++i) {
    for (unsigned e = 0; e < 2; ++e)
      store_shared_u16(static_cast<unsigned>(rows[8 * i + 2 * t + e]) + 2 * g,
                       static_cast<unsigned short>(d[i] >> 16 * e));
  }
}

inline unsigned transpose_matrix(unsigned a) {
  const uint64_t* all = emulator::exchange(a);
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto element = [&](unsigned row, unsigned column) {
    return static_cast<unsigned>(all[4 * row + column / 2] >> column % 2 * 16 & 0xffff);
  };
  return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

// c [16, 8] += a [16, 16] b [16, 8].
template <class Decode>
void multiply_fragments(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], Decode decode) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float rows[2][16], columns[2][16];  // of a: g, g + 8; of b: 2t, 2t + 1
  for (unsigned i = 0; i < 4; ++i) {
    const uint64_t* all = emulator::exchange(a[i]);
    for (unsigned k = 0; k < 8; ++k)
      rows[i % 2][i / 2 * 8 + k] = decode(static_cast<uint16_t>(all[4 * g + k / 2] >> k % 2 * 16));
  }
  for (unsigned i = 0; i < 2; ++i) {
    const uint64_t* all = emulator::exchange(b[i]);
    for (unsigned e = 0; e < 2; ++e) {
      for (unsigned k = 0; k < 8; ++k)
        columns[e][i * 8 + k] = decode(static_cast<uint16_t>(all[4 * (2 * t + e) + k / 2] >> k % 2 * 16));
    }
  }
  for (unsigned j = 0; j < 4; ++j) {
    float sum = 0;
    for (unsigned k = 0; k < 16; ++k) sum += rows[j / 2][k] * columns[j % 2][k];
    c[j] += sum;
  }
}
inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_fragments(c, a, b, [](uint16_t x) { return __uint_as_float(static_cast<unsigned>(x) << 16); });
}
inline void mma_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_fragments(c, a, b, [](uint16_t x) { return emulator::from_half(x); });
}

}  // namespace attune::ptx
