// SPDX-License-Identifier: Apache-2.0
// Stores of the epilogue: normalized rows to `out`, or a split to the workspace. The block that finishes the last split
// combines all of them, in the order of their keys.
#pragma once

#include "common/finish.cuh"
#include "common/lanes.cuh"
#include "prefill/accumulators.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
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

// Packed rows that a warp combines together, and splits whose loads it has in flight. One row and split at a time, a
// warp would wait for the L2 cache 16 * (1 + splits) times.
constexpr int kChannelPairs = (Config::kChannels + 63) / 64;  // of a lane
constexpr int kRowsAtOnce = Config::kCached && kChannelPairs <= 2 ? 4 : 2, kSplitsAtOnce = 4;

// One warp combines packed rows row, row + kConsumerWarps... below num_rows, kRowsAtOnce of them.
// M = max_i m_i; L = sum_i l_i 2^(m_i - M); O = sum_i o_i 2^(m_i - M).
__device__ __forceinline__ void combine_rows(const WorkTileParams& p, const WorkTile& t, int head_tile, int row,
                                             int num_rows) {
  const int lane = threadIdx.x % 32;
  const auto row_at = [&](int r) { return min(row + r * Config::kConsumerWarps, num_rows - 1); };
  const long long begin = split_row(p, t, head_tile, 0);
  const float2* const stats_begin = reinterpret_cast<const float2*>(p.partial_stats) + begin;
  const float* const out_begin = p.partial_out + begin * Config::kChannels + 2 * lane;
  const auto at = [&](int r, int i) { return i * p.num_head_tiles * Config::kRows + row_at(r); };
  const auto stats = [&](int r, int i) { return ptx::load_from_l2(stats_begin + at(r, i)); };
  float max[kRowsAtOnce], row_max_ref[kRowsAtOnce], row_sum[kRowsAtOnce] = {};
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) max[r] = -ptx::infinity();
  for (int i = lane; i < t.num_splits; i += 32) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) max[r] = fmaxf(max[r], stats(r, i).x);
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    max[r] = common::max_of_lanes(max[r]);
    row_max_ref[r] = finite_row_max(max[r]);
  }
  float2 o[kRowsAtOnce][kChannelPairs] = {};
#pragma unroll 1
  for (int first = 0; first < t.num_splits; first += kSplitsAtOnce) {
    float2 part[kSplitsAtOnce][kRowsAtOnce], x[kSplitsAtOnce][kRowsAtOnce][kChannelPairs];
#pragma unroll
    for (int s = 0; s < kSplitsAtOnce; ++s) {
      const int i = min(first + s, t.num_splits - 1);
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        part[s][r] = stats(r, i);
        const float* const from = out_begin + static_cast<long long>(at(r, i)) * Config::kChannels;
#pragma unroll
        for (int k = 0; k < kChannelPairs; ++k) {
          if (64 * k + 2 * lane < Config::kChannels)
            x[s][r][k] = ptx::load_from_l2(reinterpret_cast<const float2*>(from + 64 * k));
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSplitsAtOnce; ++s) {
      if (first + s >= t.num_splits) break;
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const float rescale = ptx::exp2_approx(part[s][r].x - row_max_ref[r]);
        row_sum[r] += rescale * part[s][r].y;
#pragma unroll
        for (int k = 0; k < kChannelPairs; ++k) {
          if (64 * k + 2 * lane < Config::kChannels)
            o[r][k].x += rescale * x[s][r][k].x, o[r][k].y += rescale * x[s][r][k].y;
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (row + r * Config::kConsumerWarps >= num_rows) break;
    const int local = row_at(r) / p.heads_of_tile, token = t.token_begin + local,
              head = head_tile * p.heads_of_tile + row_at(r) - local * p.heads_of_tile;
    float factor = 0;
    if (lane == 0) factor = common::finish_row(p, t.batch, t.q_begin, token, head, max[r], row_sum[r]);
    factor = __shfl_sync(0xffffffffu, factor, 0);
#pragma unroll
    for (int k = 0; k < kChannelPairs; ++k)
      store_pair(p, out_at(p, t, token, head), 64 * k + 2 * lane, o[r][k].x * factor, o[r][k].y * factor);
  }
}

// Called by all consumer threads. Which block combines differs between runs, but the bits do not.
__device__ __forceinline__ void combine_last(const WorkTileParams& p, const WorkTile& t, int head_tile, int& is_last) {
  ptx::named_barrier_sync(kConsumerBarrier, Config::kConsumerThreads);
  if (consumer_thread() == 0) {  // racecheck has reported is_last: two named-barrier syncs order it
    const unsigned last = static_cast<unsigned>(t.num_splits - 1);
    is_last = ptx::count_arrival(p.splits_done + t.split_tile * p.num_head_tiles + head_tile, last) == last ? 1 : 0;
  }
  ptx::named_barrier_sync(kConsumerBarrier, Config::kConsumerThreads);
  if (is_last == 0) return;
  const int num_rows = t.num_tokens * p.heads_of_tile;
#pragma unroll 1
  for (int row = consumer_thread() / 32; row < num_rows; row += kRowsAtOnce * Config::kConsumerWarps)
    combine_rows(p, t, head_tile, row, num_rows);
}

}  // namespace attune::prefill
