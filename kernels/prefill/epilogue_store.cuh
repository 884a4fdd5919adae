// SPDX-License-Identifier: Apache-2.0
// Stores of the epilogue: normalized rows to `out`, or a split to the workspace.
#pragma once

#include "common/finish.cuh"
#include "prefill/accumulators.cuh"
#include "ptx/matrix.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

using common::out_at;

// Stores two channels of the row whose first element is `at`.
__device__ __forceinline__ void store_pair(const WorkTileParams& p, long long at, int channel, float x, float y) {
  if (channel >= Config::kHeadDimV) return;
  common::store_element(Config::kOutType, p.out, at + channel * p.out_dim_stride, x);
  if (Config::kHeadDimV % 2 != 0 && channel + 1 >= Config::kHeadDimV) return;
  common::store_element(Config::kOutType, p.out, at + (channel + 1) * p.out_dim_stride, y);
}

// fp8 inputs, 16-bit outputs: a thread has four contiguous channels, and four threads fill a sector of 32 bytes.
__device__ __forceinline__ void store_permuted(const WorkTileParams& p, const Accumulators& a, const float (&factor)[2],
                                               const long long (&at)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (at[h] < 0) continue;
#pragma unroll
    for (int i = 0; i < Accumulators::kPairs; i += 2) {
      const int channel = Accumulators::first_of_pair(i, threadIdx.x % 4 * 2);
      unsigned r[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int from = Accumulators::pair_at(h, i + j);
        const float x = a.o[from] * factor[h], y = a.o[from + Accumulators::kPairStep] * factor[h];
        r[j] = common::pack<Config::kOutType>(x, y);
      }
      if (channel < Config::kHeadDimV)
        *reinterpret_cast<uint2*>(p.out + (at[h] + channel) * 2) = make_uint2(r[0], r[1]);
    }
  }
}

// Stages 16-bit rows in shared memory: 16 rows of 128 bytes for each 64 channels; blocks of channels are kRows rows
// apart. stmatrix writes the accumulators there; then rows are stored 16 bytes at a time. The swizzle puts the eight
// rows of a matrix, and those of a load, into different banks.
__device__ __forceinline__ void store_through_smem(const WorkTileParams& p, unsigned shared, const Accumulators& a,
                                                   const float (&factor)[2], const long long (&at)[2]) {
  constexpr int kBlock = Config::kRows * 128, kEightRows = 8 * 128;
  const int lane = threadIdx.x % 32;
  const auto swizzle = [](int row) { return (row & 1) << 2 | (row >> 1 & 3); };
  // The matrices: rows 0..7 and 8..15 of eight channels, then of the next eight.
  const unsigned to = shared + lane / 8 % 2 * kEightRows + lane % 8 * 128 + (lane / 16 ^ swizzle(lane % 8)) * 16;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Config::kChannels / 16; ++i) {
    unsigned r[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = a.o[8 * i + 2 * j] * factor[j % 2], y = a.o[8 * i + 2 * j + 1] * factor[j % 2];
      r[j] = common::pack<Config::kOutType>(x, y);
    }
    ptx::store_matrix_x4((to ^ i % 4 * 32) + i / 4 * kBlock, r);
  }
  __syncwarp();
  const unsigned from = shared + lane / 4 * 128 + (lane % 4 ^ swizzle(lane / 4)) * 16;
  // all loads come before the first store, because stores in between would wait
  unsigned r[2][Config::kChannels / 32][4];
#pragma unroll
  for (int i = 0; i < 2 * (Config::kChannels / 32); ++i) {
    const int h = i % 2, j = i / 2;
    ptx::load_shared_four((from ^ j % 2 * 64) + j / 2 * kBlock + h * kEightRows, r[h][j]);
  }
  char* const row[2] = {p.out + (at[0] + 8 * (lane % 4)) * 2, p.out + (at[1] + 8 * (lane % 4)) * 2};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < Config::kChannels / 32; ++j) {
      if (at[h] >= 0 && 32 * j + 8 * (lane % 4) < Config::kHeadDimV)
        *reinterpret_cast<uint4*>(row[h] + 64 * j) = make_uint4(r[h][j][0], r[h][j][1], r[h][j][2], r[h][j][3]);
    }
  }
}

// For each of this thread's rows: the factor of O and the offset in `out`; -1: not stored.
struct OutRows {
  float factor[2];
  long long at[2];
};
// Does not need O. Called by all lanes of the warp, also for padding rows. Lanes 0 and 1 of a quad finish one row each.
__device__ __forceinline__ OutRows finish_rows(const WorkTileParams& p, const WorkTile& t, const Rows& rows,
                                               const Accumulators& a) {
  const int lane = threadIdx.x % 32, mine = lane % 2;
  const int token = mine != 0 ? rows.token[1] : rows.token[0], head = mine != 0 ? rows.head[1] : rows.head[0];
  float own_factor = 0;
  long long own_at = -1;
  if (token >= 0) {
    own_at = out_at(p, t, token, head);
    if (lane % 4 < 2)
      own_factor = common::finish_row(p, t.batch, t.q_begin, token, head, mine != 0 ? a.row_max[1] : a.row_max[0],
                                      mine != 0 ? a.row_sum[1] : a.row_sum[0]);
  }
  __syncwarp();
  OutRows out;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    out.factor[h] = __shfl_sync(0xffffffffu, own_factor, (lane & ~3) + h) * a.o_scale[h];
    out.at[h] = __shfl_sync(0xffffffffu, own_at, (lane & ~3) + h);
  }
  return out;
}

// The same if only `out` is stored, without sinks and out_scale. row_sum is still relative to row_max_ref. base: the
// work tile's first element in out.
__device__ __forceinline__ OutRows finish_plain_rows(const WorkTileParams& p, const Rows& rows, const Accumulators& a,
                                                     long long base) {
  const int step = static_cast<int>(p.out_row_stride), head_step = static_cast<int>(p.out_head_stride);
  OutRows out;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_of_thread() + 8 * h, token = token_of_row(p, row);
    out.factor[h] = a.row_sum[h] == 0 ? 0.0f : ptx::reciprocal_approx(a.row_sum[h]);
    out.at[h] = rows.token[h] >= 0 ? base + (token * step + (row - token * p.heads_of_tile) * head_step) : -1;
  }
  return out;
}

// Stores normalized rows. shared: where they may be staged, or 0.
__device__ __forceinline__ void store_out(const WorkTileParams& p, const OutRows& out, const Accumulators& a,
                                          unsigned shared) {
  constexpr bool k16Bits = common::is_16_bit(Config::kOutType);
  const int lane = threadIdx.x % 32;
  const float(&factor)[2] = out.factor;
  const long long(&at)[2] = out.at;
  if constexpr (Config::kFp8 && k16Bits) {
    if (p.store_vectors) return store_permuted(p, a, factor, at);
  } else if constexpr (Config::kStoreOutThroughQ) {
    if (p.store_vectors) return store_through_smem(p, shared, a, factor, at);
  } else if (k16Bits && p.store_vectors) {
    // Transposes the whole row before the first store, so that the shuffles overlap.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unsigned r[Config::kChannels / 32][4];
#pragma unroll
      for (int i = 0; i < Config::kChannels / 32; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = a.o[16 * i + 4 * j + 2 * h] * factor[h], y = a.o[16 * i + 4 * j + 2 * h + 1] * factor[h];
          r[i][j] = common::pack<Config::kOutType>(x, y);
        }
        common::transpose_quad(r[i]);
      }
      if (at[h] < 0) continue;
#pragma unroll
      for (int i = 0; i < Config::kChannels / 32; ++i) {
        const int channel = 32 * i + 8 * (lane % 4);
        if (channel < Config::kHeadDimV)
          *reinterpret_cast<uint4*>(p.out + (at[h] + channel) * 2) = make_uint4(r[i][0], r[i][1], r[i][2], r[i][3]);
      }
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (at[h] < 0) continue;
#pragma unroll
    for (int j = 0; j < Accumulators::kPairs; ++j) {
      const int from = Accumulators::pair_at(h, j);
      store_pair(p, at[h], Accumulators::first_of_pair(j, lane % 4 * 2), a.o[from] * factor[h],
                 a.o[from + Accumulators::kPairStep] * factor[h]);
    }
  }
}

// The first workspace row of split i of the work tile's row block and head tile.
__device__ __forceinline__ long long split_row(const WorkTileParams& p, const WorkTile& t, int head_tile, int i) {
  return (static_cast<long long>(t.first_split + i) * p.num_head_tiles + head_tile) * Config::kRows;
}

__device__ __forceinline__ void store_split(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                            const Accumulators& a) {
  const int row = row_of_thread(), pair = threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const long long at = split_row(p, t, head_tile, t.split_idx) + row + 8 * h;
    if (pair == 0) *reinterpret_cast<float2*>(p.partial_stats + 2 * at) = make_float2(a.row_max[h], a.row_sum[h]);
#pragma unroll
    for (int j = 0; j < Accumulators::kPairs; ++j) {
      const int from = Accumulators::pair_at(h, j);
      *reinterpret_cast<float2*>(p.partial_out + at * Config::kChannels + Accumulators::first_of_pair(j, pair)) =
          make_float2(a.o[from] * a.o_scale[h], a.o[from + Accumulators::kPairStep] * a.o_scale[h]);
    }
  }
}

}  // namespace attune::prefill
