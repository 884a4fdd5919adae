// SPDX-License-Identifier: Apache-2.0
// The epilogue: stores normalised rows.
#pragma once

#include "common/finish.cuh"
#include "prefill/mma/softmax.cuh"

namespace attune::prefill_mma {

// Whether store_row() can store the rows.
constexpr bool kWholeChunks = Config::kHeadDimV % 8 == 0,
               kStoresVectors = common::is_16_bit(Config::kOutType) && Config::kBlocksV % 2 == 0 && kWholeChunks;

// Stores two channels of the row whose first element is `at`.
__device__ __forceinline__ void store_pair(const WorkTileParams& p, long long at, int channel, float x, float y) {
  if (channel >= Config::kHeadDimV) return;
  if constexpr (common::is_16_bit(Config::kOutType) && kWholeChunks) {
    if (!kStoresVectors && p.store_vectors != 0) {
      *reinterpret_cast<unsigned*>(p.out + (at + channel) * 2) = common::pack<Config::kOutType>(x, y);
      return;
    }
  }
  common::store_element(Config::kOutType, p.out, at + channel * p.out_dim_stride, x);
  if (channel + 1 < Config::kHeadDimV)
    common::store_element(Config::kOutType, p.out, at + (channel + 1) * p.out_dim_stride, y);
}

// Stores row h of a row tile, 16 bytes a lane: the four lanes that share the row exchange 32 channels. Called by all
// lanes of the warp. at: negative if the row is not stored.
__device__ __forceinline__ void store_row(const WorkTileParams& p, long long at, int h,
                                          const float (&o)[2 * Config::kBlocksV][4], float factor) {
#pragma unroll
  for (int c = 0; c < 2 * Config::kBlocksV; c += 4) {
    unsigned r[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      r[j] = common::pack<Config::kOutType>(o[c + j][2 * h] * factor, o[c + j][2 * h + 1] * factor);
    common::transpose_quad(r);
    const int channel = 8 * (c + static_cast<int>(threadIdx.x % 4));
    if (at >= 0 && channel < Config::kHeadDimV)
      *reinterpret_cast<uint4*>(p.out + (at + channel) * 2) = make_uint4(r[0], r[1], r[2], r[3]);
  }
}

__device__ __forceinline__ void epilogue(const WorkTileParams& p, const WorkTile& t, int head, const State& state) {
  constexpr float kUndoMaxOffset = 1.0f / (1 << Config::kMaxOffset);
  const int pair = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_sum = kUndoMaxOffset * quad_sum(state.row_sum[m][h]);
      const int row = Rows::row(m, h), token = t.token_begin + row;
      const bool row_exists = row < t.num_tokens;
      float factor = 0;
      if (row_exists)
        factor = kUndoMaxOffset *
                 common::finish_row(p, t.batch, t.q_begin, token, head, state.row_max_ref[m][h], row_sum, pair == 0);
      const long long at = row_exists ? common::out_at(p, t, token, head) : -1;
      __syncwarp();
      if (kStoresVectors && p.store_vectors != 0) {
        store_row(p, at, h, state.o[m], factor);
        continue;
      }
      if (!row_exists) continue;
#pragma unroll
      for (int c = 0; c < 2 * Config::kBlocksV; ++c)
        store_pair(p, at, 8 * c + pair, state.o[m][c][2 * h] * factor, state.o[m][c][2 * h + 1] * factor);
    }
  }
}

}  // namespace attune::prefill_mma
