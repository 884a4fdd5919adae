// SPDX-License-Identifier: Apache-2.0
// The block that finishes the last split of a row block combines all of them, in the order of their keys:
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M)
#pragma once

#include "common/finish.cuh"
#include "common/lanes.cuh"
#include "prefill/epilogue_store.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"

namespace attune::prefill {

constexpr int kVectors = (Config::kChannels + 127) / 128;  // of four channels, of a lane
// Packed rows that a warp combines together, and splits whose loads it has in flight. One row and split at a time, a
// warp would wait for the L2 cache 16 * (1 + splits) times.
constexpr int kRowsAtOnce = Config::kCached && kVectors == 1 && Config::kRows <= 128 ? 4 : 2,
              kSplitsAtOnce = Config::kRows <= 128 ? 4 : 2;
static_assert(Config::kRows % (kRowsAtOnce * Config::kConsumerWarps) == 0, "no row beyond the split is read");

// Stores channels 4 * lane, 4 * lane + 128... of the row whose first element is `at`.
__device__ __forceinline__ void store_combined(const WorkTileParams& p, long long at, float factor,
                                               const float4 (&o)[kVectors]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int channel = 128 * v + threadIdx.x % 32 * 4;
    if (channel >= Config::kHeadDimV) continue;
    const float4 x{o[v].x * factor, o[v].y * factor, o[v].z * factor, o[v].w * factor};
    if constexpr (Config::kHeadDimV % 4 == 0) {
      common::store_four<Config::kOutType>(p.out, at + channel * p.out_dim_stride, p.out_dim_stride, x);
    } else {
      store_pair(p, at, channel, x.x, x.y);
      store_pair(p, at, channel + 2, x.z, x.w);
    }
  }
}

// One warp combines packed rows row, row + kConsumerWarps... below num_rows, kRowsAtOnce of them. Padding rows are
// combined, too, and not stored.
__device__ __forceinline__ void combine_rows(const WorkTileParams& p, const WorkTile& t, int head_tile, int row,
                                             int num_rows) {
  const int lane = threadIdx.x % 32;
  const long long begin = split_row(p, t, head_tile, 0) + row;
  const float2* const stats_begin = reinterpret_cast<const float2*>(p.partial_stats) + begin;
  const float* const out_begin = p.partial_out + begin * Config::kChannels + 4 * lane;
  const auto at = [&](int r, int i) { return i * p.num_head_tiles * Config::kRows + r * Config::kConsumerWarps; };
  const auto stats = [&](int r, int i) {
    return i < t.num_splits ? ptx::load_from_l2(stats_begin + at(r, i)) : float2{-ptx::infinity(), 0};
  };
  // Each lane rescales one split. More than 32 splits take several rounds; the stats of the first round are kept.
  float2 own[kRowsAtOnce];
  float max[kRowsAtOnce], row_sum[kRowsAtOnce] = {};
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) own[r] = stats(r, lane), max[r] = own[r].x;
#pragma unroll 1
  for (int i = 32 + lane; i < t.num_splits; i += 32) {
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) max[r] = fmaxf(max[r], stats(r, i).x);
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) max[r] = common::max_of_lanes(max[r]);
  float4 o[kRowsAtOnce][kVectors] = {};
#pragma unroll 1
  for (int first = 0; first < t.num_splits; first += kSplitsAtOnce) {
    float4 x[kSplitsAtOnce][kRowsAtOnce][kVectors];  // zeros of splits that are not there
#pragma unroll
    for (int s = 0; s < kSplitsAtOnce; ++s) {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const float* const from = out_begin + static_cast<long long>(at(r, first + s)) * Config::kChannels;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const bool has = first + s < t.num_splits && 128 * v + 4 * lane < Config::kChannels;
          x[s][r][v] = ptx::load_from_l2_if(has, reinterpret_cast<const float4*>(from + 128 * v));
        }
      }
    }
    if (first % 32 == 0) {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (first > 0) own[r] = stats(r, first + lane);
        own[r].x = ptx::exp2_approx(own[r].x - finite_row_max(max[r]));
        own[r].y *= own[r].x;
      }
    }
#pragma unroll
    for (int s = 0; s < kSplitsAtOnce; ++s) {
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const float rescale = __shfl_sync(0xffffffffu, own[r].x, (first + s) % 32);
        row_sum[r] += __shfl_sync(0xffffffffu, own[r].y, (first + s) % 32);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          o[r][v].x += rescale * x[s][r][v].x, o[r][v].y += rescale * x[s][r][v].y;
          o[r][v].z += rescale * x[s][r][v].z, o[r][v].w += rescale * x[s][r][v].w;
        }
      }
    }
  }
  // Lane r finishes row r.
  float own_max = max[0], own_sum = row_sum[0], factor = 0;
#pragma unroll
  for (int r = 1; r < kRowsAtOnce; ++r) {
    if (lane == r) own_max = max[r], own_sum = row_sum[r];
  }
  const int packed = row + lane * Config::kConsumerWarps;
  long long out_row = 0;
  if (lane < kRowsAtOnce && packed < num_rows) {
    const int local = packed / p.heads_of_tile, token = t.token_begin + local,
              head = head_tile * p.heads_of_tile + packed - local * p.heads_of_tile;
    factor = common::finish_row(p, t.batch, t.q_begin, token, head, own_max, own_sum);
    out_row = out_at(p, t, token, head);
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (row + r * Config::kConsumerWarps >= num_rows) break;
    store_combined(p, __shfl_sync(0xffffffffu, out_row, r), __shfl_sync(0xffffffffu, factor, r), o[r]);
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
