// SPDX-License-Identifier: Apache-2.0
// The m16 kernel's GEMMs by mma.sync, for one warp: cached rows are operands by ldmatrix, q is in registers. g = lane /
// 4, t = lane % 4.
//
//   load_q(p, work, head_tile)           called by all consumer warps together
//   qk_gemm(smem, stage, s)              s = (row g, keys 2 t, 2 t + 1 of the warp's), then row g + 8
//   publish_p(smem, buffer, p_regs)      stores P for all warps
//   pv_gemm(smem, stage, buffer, o)      o += P of all keys * V of the warp's channels
//   transpose_channels(o)                afterwards channel() is the lane's first channel of a block
#pragma once

#include "common/lanes.cuh"
#include "mla/m16/operands.cuh"

namespace attune::mla {

class M16Gemms {
  static_assert(!Config::kDequant, "packed rows: mla/swap_ab.cu");

 public:
  // A lane loads eight neighbouring channels and exchanges them with its three neighbours.
  __device__ __forceinline__ void load_q(const WorkTileParams& p, const WorkTile& work, int head_tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const QueryRow row = query_row(p, work, head_tile, lane / 4 + 8 * h);
#pragma unroll
      for (int i = 0; i < kBlocks; i += 2) {
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (row.exists()) eight = *reinterpret_cast<const uint4*>(row.at(16 * i) + 16 * (lane % 4));
        q_[i][h] = eight.x, q_[i][2 + h] = eight.y, q_[i + 1][h] = eight.z, q_[i + 1][2 + h] = eight.w;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kBlocks; i += 2) {
        unsigned four[4] = {q_[i][h], q_[i][2 + h], q_[i + 1][h], q_[i + 1][2 + h]};
        common::transpose_quad(four);
        q_[i][h] = four[0], q_[i][2 + h] = four[1], q_[i + 1][h] = four[2], q_[i + 1][2 + h] = four[3];
      }
    }
  }

  __device__ __forceinline__ void qk_gemm(const M16Smem& smem, int stage, float (&s)[4]) const {
    const unsigned from = m16_k_address(smem, stage);
    // every fourth block has a separate accumulator, because an mma waits for the one before it
    float products[4][4] = {};
#pragma unroll
    for (int i = 0; i < kBlocks; i += 2) {
      unsigned keys[4];
      ptx::load_matrix_x4(keys, from + 32 * i);
#pragma unroll
      for (int j = 0; j < 2; ++j) mma(products[(i + j) % 4], q_[i + j], {keys[2 * j], keys[2 * j + 1]});
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = (products[0][i] + products[1][i]) + (products[2][i] + products[3][i]);
  }

  __device__ __forceinline__ void publish_p(const M16Smem& smem, unsigned buffer, const float (&p_regs)[4]) const {
    const unsigned to = smem.p(buffer) + m16_p_offset();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ptx::store_shared_u32(to + h * (8 * 128), common::pack<Config::kType>(p_regs[2 * h], p_regs[2 * h + 1]));
    }
  }

  __device__ __forceinline__ void pv_gemm(const M16Smem& smem, int stage, unsigned buffer, M16Out& o) const {
    const int lane = recomputed_lane();
    const unsigned row = m16_p_row(smem, buffer, lane);
    const unsigned from = m16_v_address(smem, stage);
#pragma unroll
    for (int step = 0; step < M16Config::kBlockN / 16; ++step) {
      unsigned p_regs[4];
      m16_load_p(row, lane, step, p_regs);
#pragma unroll
      for (int b = 0; b < M16Out::kBlocks; ++b) {
        unsigned values[4];
        ptx::load_matrix_x4_transposed(values, from + step * (16 * M16Config::kPitch) + 32 * b);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma(o.blocks[b][i], p_regs, {values[2 * i], values[2 * i + 1]});
      }
    }
  }

  // A block has two accumulators of eight channels, and a lane has channels 2 t and 2 t + 1 of each. Two neighbouring
  // lanes exchange halves: the even one gets four adjacent channels of the first accumulator, the odd one of the
  // second.
  __device__ __forceinline__ static void transpose_channels(M16Out& o) {
    const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
    for (int i = 0; i < 4 * M16Out::kBlocks; ++i) {
      float& x = o.blocks[i / 4][0][i % 4];
      float& y = o.blocks[i / 4][1][i % 4];
      const float got = __shfl_xor_sync(0xffffffffu, odd ? x : y, 1);
      x = odd ? got : x;
      y = odd ? y : got;
    }
  }
  __device__ __forceinline__ static int channel() {
    const int t = static_cast<int>(threadIdx.x) % 4;
    return t % 2 * 8 + t / 2 * 4;
  }

 private:
  static constexpr int kBlocks = Config::kHeadDimQk / 16;

  __device__ __forceinline__ static void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (Config::kType == common::kBFloat16) {
      ptx::mma_bf16(c, a, b);
    } else {
      ptx::mma_f16(c, a, b);
    }
  }

  unsigned q_[kBlocks][4];
};

}  // namespace attune::mla
