// SPDX-License-Identifier: Apache-2.0
// Addresses of the m16 kernel's operands; its O.
#pragma once

#include "mla/m16/config.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

// O: 64 channels in blocks of 16; a lane has four channels of each block, for rows g and g + 8.
struct M16Out {
  static constexpr int kBlocks = M16Config::kChannelsOfWarp / 16, kCount = kBlocks * 8;
  // Two accumulators for each block: [row g, two columns], [row g + 8, two columns].
  float blocks[kBlocks][2][4];
  __device__ __forceinline__ float& at(int i) { return blocks[i / 8][i / 4 % 2][i % 4]; }
};

// The addresses of cached rows that the lane gives to ldmatrix.x4. K: eight rows, four adjacent 16-byte vectors. V:
// sixteen rows, two adjacent vectors, loaded transposed, so that a register has two keys of one channel.
__device__ __forceinline__ unsigned m16_k_address(const M16Smem& smem, int stage) {
  const int lane = recomputed_lane();
  return smem.row(stage, consumer_warp() * M16Config::kKeysOfWarp + lane % 8) + lane / 8 * 16;
}
__device__ __forceinline__ unsigned m16_v_address(const M16Smem& smem, int stage) {
  const int lane = recomputed_lane();
  return smem.row(stage, lane % 16) + consumer_warp() * M16Config::kChannelsOfWarp * 2 + lane / 16 * 16;
}

// P of all keys has 128 bytes for each row, in swizzled vectors of 16 bytes. The offset of row g and the lane's two
// keys; row g + 8 is 8 * 128 bytes further.
__device__ __forceinline__ unsigned m16_p_offset() {
  const int lane = recomputed_lane();
  return lane / 4 * 128 + (consumer_warp() ^ lane / 4) * 16 + lane % 4 * 4;
}
// The row that the lane gives to ldmatrix; and the A operand of 16 keys of that row.
__device__ __forceinline__ unsigned m16_p_row(const M16Smem& smem, unsigned buffer, int lane) {
  return smem.p(buffer) + lane % 16 * 128;
}
__device__ __forceinline__ void m16_load_p(unsigned row, int lane, int step, unsigned (&p_regs)[4]) {
  ptx::load_matrix_x4(p_regs, row + ((2 * step + lane / 16) ^ lane % 8) * 16);
}

}  // namespace attune::mla
