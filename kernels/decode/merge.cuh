// SPDX-License-Identifier: Apache-2.0
// The end of a piece, inside a block: the warps merge what they have, in the order of their numbers, and store it.
#pragma once

#include "decode/attend.cuh"
#include "tile/finish.cuh"

namespace attune::decode {

// What a warp's numbers are multiplied with in the merge, [warp][row], and the row's own numbers.
struct MergeStats {
  float* max;        // [kWarps][kRows]
  float* sum;
  float* value_max;
  float* weight;     // over sum, once it has been read
  __device__ __forceinline__ explicit MergeStats(unsigned char* shared) {
    max = reinterpret_cast<float*>(shared + Config::kShared.stats);
    sum = max + Config::kWarps * Config::kRows;
    value_max = sum + Config::kWarps * Config::kRows;
    weight = sum;
  }
};

// Where a block keeps partial results: the pair that came in from the block before in the first place, the one that goes on in the second.
__device__ __forceinline__ long long partial_row(const Piece& piece, int row) {
  return (2ll * blockIdx.x + (piece.starts ? 1 : 0)) * Config::kRows + row;
}

__device__ __forceinline__ void share_stats(const State& state, const MergeStats& stats) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = sum_of_keys(state.sum[n][e]);
      const int at = warp * Config::kRows + 8 * n + lane % 4 * 2 + e;
      if (lane >= 4) continue;
      stats.max[at] = state.max[n][e];
      stats.sum[at] = sum;
      if constexpr (Config::kTokenScales) stats.value_max[at] = state.value_max[n][e];
    }
  }
}

// One thread a row: merges the stats, stores them, and leaves each warp's weight.
__device__ __forceinline__ void weigh_row(const DecodeParams& p, const Piece& piece, long long q_begin, bool whole, const MergeStats& stats,
                                          int row) {
  float max = kNegativeInfinity, sum = 0;
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) max = fmaxf(max, stats.max[w * Config::kRows + row]);
  const float reference = reference_of(max);
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    const int at = w * Config::kRows + row;
    sum += stats.sum[at] * ptx::exp2_approx(stats.max[at] - reference);
  }
  float factor = 1.0f;
  if (p.v_scale.mode == 1) factor = p.v_scale.data[0];
  if (p.v_scale.mode == 2) factor = p.v_scale.data[piece.head * p.v_scale.head_stride];
  if (row < piece.num_rows) {
    if (whole) {
      const int packed = piece.row_begin + row, query = packed / p.group;
      const float last = tile::finish_row(p, piece.batch, q_begin, query, piece.head * p.group + packed - query * p.group, max, sum);
      factor = max == kNegativeInfinity && sum == 0 ? 0.0f : factor * last;
    } else {
      float* to = p.partial_stats + 2 * partial_row(piece, row);
      to[0] = max;
      to[1] = sum;
    }
  }
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    const int at = w * Config::kRows + row;
    stats.weight[at] = factor * ptx::exp2_approx((Config::kTokenScales ? stats.value_max[at] : stats.max[at]) - reference);
  }
}

// Channels [first, first + kMergeChannels) of every row: all warps to shared memory, then the sum over them to where it belongs.
__device__ __forceinline__ void share_channels(const State& state, const MergeStats& stats, float* exchange, int first_block) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < Config::kBlocksV; ++i) {
    const int local = i - first_block;
    if (local < 0 || local >= Config::kMergeChannels / 16) continue;
#pragma unroll
    for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 8 * n + 2 * t + j % 2;
        const float weight = stats.weight[warp * Config::kRows + row];
        exchange[(warp * Config::kRows + row) * Config::kMergePitch + tile::channel_of_row<Config::kKvType>(local, g, j / 2)] =
            state.o[i][n][j] * weight;
      }
    }
  }
}

// Four channels of a row of the output.
__device__ __forceinline__ void store_four(const DecodeParams& p, long long at, const float4& x) {
  tile::store_element(Config::kOutType, p.out, at, x.x);
  tile::store_element(Config::kOutType, p.out, at + p.out_dim_stride, x.y);
  tile::store_element(Config::kOutType, p.out, at + 2 * p.out_dim_stride, x.z);
  tile::store_element(Config::kOutType, p.out, at + 3 * p.out_dim_stride, x.w);
}

__device__ __forceinline__ void store_channels(const DecodeParams& p, const Piece& piece, long long q_begin, bool whole,
                                               const float* exchange, int first_channel) {
  constexpr int kGroups = Config::kMergeChannels / 4;  // of four channels, a row
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kRows * kGroups; i += Config::kThreads) {
    const int row = i / kGroups, local = i % kGroups * 4, channel = first_channel + local;
    if (row >= piece.num_rows || channel >= Config::kHeadDimV) continue;
    float4 sum{0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      const float4 x = *reinterpret_cast<const float4*>(exchange + (w * Config::kRows + row) * Config::kMergePitch + local);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    if (!whole) {
      *reinterpret_cast<float4*>(p.partial_out + partial_row(piece, row) * Config::kHeadDimV + channel) = sum;
      continue;
    }
    const int packed = piece.row_begin + row, query = packed / p.group;
    const long long at = tile::row_offset(p, piece.batch, q_begin, query, piece.head * p.group + packed - query * p.group,
                                          p.out_batch_stride, p.out_row_stride, p.out_head_stride) + channel * p.out_dim_stride;
    store_four(p, at, sum);
  }
}

}  // namespace attune::decode
