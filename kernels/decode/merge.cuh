// SPDX-License-Identifier: Apache-2.0
// The end of a piece, inside a block: the warps merge what they have, in the order of their numbers, and store it.
#pragma once

#include "decode/attend.cuh"
#include "decode/shared_storage.cuh"
#include "tile/finish.cuh"

namespace attune::decode {

constexpr float kLowered = 1.0f / (1 << static_cast<int>(kLift));  // undoes the lift

// What a warp's numbers are multiplied with in the merge, [warp][row], and the row's own numbers.
struct MergeStats {
  float* max;  // [kWarps][kRows]
  float* sum;
  float* value_max;
  float* weight;  // over sum, once it has been read
  __device__ __forceinline__ explicit MergeStats(SharedStorage& shared) {
    max = shared.max[0];
    sum = shared.sum[0];
    value_max = shared.value_max[0];
    weight = shared.weight[0];
  }

  __device__ __forceinline__ float max_of_row(int row) const {
    float result = -ptx::infinity();
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) result = fmaxf(result, max[w * Config::kRows + row]);
    return result;
  }
  __device__ __forceinline__ float sum_of_row(int row, float reference) const {
    float result = 0;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      const int at = w * Config::kRows + row;
      result += sum[at] * ptx::exp2_approx(max[at] - reference);
    }
    return result;
  }
  // What a warp's o of the row is multiplied with, but for the scale of values. at: warp * kRows + row.
  __device__ __forceinline__ float weight_of(int at, float reference) const {
    return kLowered * ptx::exp2_approx((Config::kTokenScales ? value_max[at] : max[at]) - reference);
  }
};

// The scale of cached values, where it is not a token's.
__device__ __forceinline__ float value_scale(const DecodeParams& p, int head) {
  float factor = 1.0f;
  if (!Config::kNewTokens && p.v_scale.mode == 1) factor = p.v_scale.data[0];
  if (!Config::kNewTokens && p.v_scale.mode == 2) factor = p.v_scale.data[head * p.v_scale.head_stride];
  return factor;
}

// Four channels of a row, over the warps; exchange: [kWarps][kRows] of `pitch`.
__device__ __forceinline__ float4 sum_over_warps(const float* exchange, int pitch, int row, int channel) {
  float4 sum{0, 0, 0, 0};
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    const float4 x = *reinterpret_cast<const float4*>(exchange + (w * Config::kRows + row) * pitch + channel);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  return sum;
}

// Where a block leaves its part of a pair that it shares with others: rows of head_dim_v floats, and of (max, sum). out
// null: nowhere, the block has the whole pair.
struct PartPlace {
  float* out;
  float* stats;
};

__device__ __forceinline__ void share_stats(const State& state, const MergeStats& stats) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = kLowered * sum_of_keys(state.sum[n][e]);
      const int at = warp * Config::kRows + 8 * n + lane % 4 * 2 + e;
      if (lane >= 4) continue;
      stats.max[at] = state.max[n][e];
      stats.sum[at] = sum;
      if constexpr (Config::kTokenScales) stats.value_max[at] = state.value_max[n][e];
    }
  }
}

// One thread a row: merges the stats, stores them, and leaves each warp's weight.
__device__ __forceinline__ void weigh_row(const DecodeParams& p, const Piece& piece, long long q_begin,
                                          const PartPlace& part, const MergeStats& stats, int row) {
  const float max = stats.max_of_row(row), reference = reference_of(max), sum = stats.sum_of_row(row, reference);
  float factor = value_scale(p, piece.head);
  if (row < piece.num_rows) {
    if (part.out == nullptr) {
      const int packed = piece.row_begin + row, query = kernels::divide(packed, p.by_group);
      const float last =
          tile::finish_row(p, piece.batch, q_begin, query, piece.head * p.group + packed - query * p.group, max, sum);
      factor = max == -ptx::infinity() && sum == 0 ? 0.0f : factor * last;
    } else {
      part.stats[2 * row] = max;
      part.stats[2 * row + 1] = sum;
    }
  }
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    const int at = w * Config::kRows + row;
    stats.weight[at] = factor * stats.weight_of(at, reference);
  }
}

// Channels [first, first + kMergeChannels) of every row: all warps to shared memory, then the sum over them to where it
// belongs.
__device__ __forceinline__ void share_channels(const State& state, const MergeStats& stats, float* exchange,
                                               int first_block) {
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
        exchange[(warp * Config::kRows + row) * Config::kMergePitch +
                 tile::channel_of_row<Config::kKvType>(local, g, j / 2)] = state.o[i][n][j] * weight;
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

__device__ __forceinline__ void store_channels(const DecodeParams& p, const Piece& piece, long long q_begin,
                                               const PartPlace& part, const float* exchange, int first_channel) {
  constexpr int kGroups = Config::kMergeChannels / 4;  // of four channels, a row
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::kRows * kGroups; i += Config::kThreads) {
    const int row = i / kGroups, local = i % kGroups * 4, channel = first_channel + local;
    if (row >= piece.num_rows || channel >= Config::kHeadDimV) continue;
    const float4 sum = sum_over_warps(exchange, Config::kMergePitch, row, local);
    if (part.out != nullptr) {
      *reinterpret_cast<float4*>(part.out + row * Config::kHeadDimV + channel) = sum;
      continue;
    }
    const int packed = piece.row_begin + row, query = kernels::divide(packed, p.by_group);
    const long long at =
        tile::row_offset(p, piece.batch, q_begin, query, piece.head * p.group + packed - query * p.group,
                         p.out_batch_stride, p.out_row_stride, p.out_head_stride) +
        channel * p.out_dim_stride;
    store_four(p, at, sum);
  }
}

// All of it: the block's warps to one result, which is stored as the output, or as the block's part.
__device__ __forceinline__ void merge_warps(const DecodeParams& p, const Piece& piece, long long q_begin,
                                            const PartPlace& part, const State& state, SharedStorage& shared) {
  const MergeStats stats(shared);
  float* const exchange = shared.exchange[0];
  share_stats(state, stats);
  __syncthreads();
  for (int row = threadIdx.x; row < Config::kRows; row += Config::kThreads)
    weigh_row(p, piece, q_begin, part, stats, row);
  __syncthreads();
#pragma unroll
  for (int block = 0; block < Config::kBlocksV; block += Config::kMergeChannels / 16) {
    if (block != 0) __syncthreads();
    share_channels(state, stats, exchange, block);
    __syncthreads();
    store_channels(p, piece, q_begin, part, exchange, block * 16);
  }
}

}  // namespace attune::decode
