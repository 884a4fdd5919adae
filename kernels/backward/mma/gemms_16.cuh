// SPDX-License-Identifier: Apache-2.0
// GEMMs of resident rows and rows of a tile by mma.m16n8k16, on 16-bit numbers in shared memory.
#pragma once

#include "backward/mma/gemms.cuh"

namespace attune::backward::mma {

__device__ __forceinline__ void multiply_add_16_bits(float (&to)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  if constexpr (Config::kType == common::kBFloat16) {
    ptx::mma_bf16(to, a, b);
  } else {
    ptx::mma_f16(to, a, b);
  }
}

// to = resident rows times rows of a step, like multiply(). resident: the warp's rows.
template <int kLines>
__device__ __forceinline__ void multiply_16_bits(unsigned resident, unsigned tile, Scores& to) {
  using Rows = Layout<kLines>;
  static_assert(kN8Tiles % 2 == 0, "a load of four matrices has two chunks of 16 rows");
  // A lane's row and first chunk in the matrices that it loads: of a, rows 0 .. 15 of a chunk, then of the next chunk;
  // of b, both chunks of eight rows, then of the next eight rows.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned a_lane = resident + Rows::offset(lane % 16, lane / 16),
                 b_lane = tile + Rows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int n = 0; n < kN8Tiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[n][j] = 0;
  }
#pragma unroll 1
  for (int line = 0; line < kLines; ++line) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {  // 16 channels, which are two chunks
      const unsigned a_at = (a_lane ^ step * 32) + line * 128, b_at = (b_lane ^ step * 32) + line * 128;
      unsigned a[4];
      ptx::load_matrix_x4(a, a_at);
#pragma unroll
      for (int n = 0; n < kN8Tiles; n += 2) {
        unsigned b[4];
        ptx::load_matrix_x4(b, b_at + 8 * n * Rows::kPitch);
        multiply_add_16_bits(to[n], a, b[0], b[1]);
        multiply_add_16_bits(to[n + 1], a, b[2], b[3]);
      }
    }
  }
}

}  // namespace attune::backward::mma
