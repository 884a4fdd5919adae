// SPDX-License-Identifier: Apache-2.0
// GEMMs and softmax of prefill_fp32_mma.cu. Each number is the sum of three bf16 numbers (bf16x3). Of the nine products
// of parts six are computed; the others are below 2^-24 of the whole.
//
// The tensor cores round their sums towards zero. So small products come first, or have separate accumulators; and P V
// of a tile starts from zero and is added to O in fp32, to nearest.
#pragma once

#include "common/operand.cuh"
#include "prefill/mma/fp32_storage.cuh"
#include "prefill/mma/softmax.cuh"
#include "ptx/matrix.cuh"

namespace attune::prefill_mma {

using common::down_then_on, common::on_then_down;

// The products of bf16x3 parts, smallest first.
constexpr int kPairs = 6;
__device__ __forceinline__ constexpr int left_part(int pair) {
  return pair == 0 ? 2 : pair == 2 || pair == 3 ? 1 : 0;
}
__device__ __forceinline__ constexpr int right_part(int pair) {
  return pair == 1 ? 2 : pair == 2 || pair == 4 ? 1 : 0;
}

constexpr int kQkUnroll = Config::kQPartsInRegisters ? Config::kBlocksQk : 2;
constexpr int kBlocksAtATime = Config::kQPartsInRegisters ? 2 : 1;  // blocks of 16 channels of O

// Loads a block of 16 channels of a warp's rows of Q: parts kFirst to kEnd - 1.
template <int kFirst, int kEnd>
__device__ __forceinline__ void load_query_parts(unsigned q, int block, unsigned (&a)[kParts][4]) {
  using Layout = Config::LayoutK;
  const unsigned lane_q = down_then_on<Layout>(q + threadIdx.x / 32 * (16 * Layout::kPitch));
#pragma unroll
  for (int part = kFirst; part < kEnd; ++part)
    ptx::load_matrix_x4(a[part], Layout::chunks_on(lane_q + part * Fp32Storage::kPartQ, 2 * block));
}
// The parts of Q that stay in registers over the mainloop.
using QFragments = unsigned[Config::kQPartsInRegisters ? Config::kBlocksQk : 1][kParts][4];
__device__ __forceinline__ void load_q_fragments(unsigned q, QFragments& q_regs) {
#pragma unroll
  for (int block = 0; Config::kQPartsInRegisters && block < Config::kBlocksQk; ++block)
    load_query_parts<0, kQRegisterParts>(q, block, q_regs[Config::kQPartsInRegisters ? block : 0]);
}

// S = Q K^T.
__device__ __forceinline__ void qk_gemm_bf16x3(unsigned q, const QFragments& q_regs, unsigned k, Scores& s) {
  using Layout = Config::LayoutK;
  float low[kKeyTiles8][4];  // accumulators of the small products
#pragma unroll
  for (int n = 0; n < kKeyTiles8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s[0][n][j] = low[n][j] = 0;
  }
  const unsigned lane_k = on_then_down<Layout>(k);
#pragma unroll kQkUnroll
  for (int block = 0; block < Config::kBlocksQk; ++block) {
    unsigned a[kParts][4];
    load_query_parts<kQRegisterParts, kParts>(q, block, a);
#pragma unroll
    for (int j = 0; j < 4 * kQRegisterParts; ++j)
      a[j / 4][j % 4] = q_regs[Config::kQPartsInRegisters ? block : 0][j / 4][j % 4];
    unsigned b[kParts][kKeyTiles8][2];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int n = 0; n < kKeyTiles8; n += 2) {
        unsigned x[4];
        ptx::load_matrix_x4(
            x, Layout::chunks_on(Layout::rows_down(lane_k + part * Fp32Storage::kPartK, 8 * n), 2 * block));
        b[part][n][0] = x[0], b[part][n][1] = x[1], b[part][n + 1][0] = x[2], b[part][n + 1][1] = x[3];
      }
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int n = 0; n < kKeyTiles8; ++n)
        common::mma<common::kBFloat16>(pair == kPairs - 1 ? s[0][n] : low[n], a[left_part(pair)],
                                       b[right_part(pair)][n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kKeyTiles8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s[0][n][j] += low[n][j];
  }
}

// Replaces scores by P, in place, like softmax() of mainloop.cuh.
__device__ __forceinline__ void softmax_in_place(float scale, float threshold, Scores& s, State& state) {
  float row_max[2];
  bool raises = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row_max[h] = scale * max_of_row(s[0], h);
    raises |= row_max[h] - state.row_max_ref[0][h] > threshold;
  }
  if (__any_sync(0xffffffffu, raises)) raise_row_max_ref(0, row_max, threshold, state);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float ref = finite_row_max(state.row_max_ref[0][h]);
#pragma unroll
    for (int n = 0; n < kKeyTiles8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[0][n][2 * h + e];
        x = ptx::exp2_approx(fmaf(x, scale, -ref));
        state.row_sum[0][h] += x;
      }
    }
  }
}

// O += P V, 16 keys at a time: P is split into parts when it is used, and each sum has few products of full size.
__device__ __forceinline__ void pv_gemm_bf16x3(unsigned v, const Scores& p_regs, State& state) {
  using Layout = Config::LayoutV;
  const unsigned lane_v = down_then_on<Layout>(v);
#pragma unroll
  for (int step = 0; step < Config::kKeys / 16; ++step) {
    unsigned a[kParts][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&x)[4] = p_regs[0][2 * step + i / 2];
      unsigned parts[kParts];
      common::split_pair(x[i % 2 * 2], x[i % 2 * 2 + 1], parts);
#pragma unroll
      for (int part = 0; part < kParts; ++part) a[part][i] = parts[part];
    }
#pragma unroll
    for (int first = 0; first < Config::kBlocksV; first += kBlocksAtATime) {
      constexpr int kMost = 2 * kBlocksAtATime;
      float sums[kMost][4];
      unsigned b[kParts][kMost][2];
#pragma unroll
      for (int i = 0; i < kBlocksAtATime; ++i) {
        if (first + i >= Config::kBlocksV) break;
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[2 * i + j / 4][j % 4] = 0;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          unsigned x[4];
          ptx::load_matrix_x4_transposed(
              x, Layout::chunks_on(Layout::rows_down(lane_v + part * Fp32Storage::kPartV, 16 * step), 2 * (first + i)));
#pragma unroll
          for (int j = 0; j < 4; ++j) b[part][2 * i + j / 2][j % 2] = x[j];
        }
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int n = 0; n < kMost; ++n) {
          if (2 * first + n < 2 * Config::kBlocksV)
            common::mma<common::kBFloat16>(sums[n], a[left_part(pair)], b[right_part(pair)][n]);
        }
      }
#pragma unroll
      for (int n = 0; n < kMost; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (2 * first + n < 2 * Config::kBlocksV) state.o[0][2 * first + n][j] += sums[n][j];
        }
      }
    }
  }
}

}  // namespace attune::prefill_mma
