// SPDX-License-Identifier: Apache-2.0
// The epilogue of a split within a block: merges the warps' results in the order of the warps. Stores the output, or a
// partial result if other blocks have splits of the same output tile.
#pragma once

#include "common/finish.cuh"
#include "decode/mainloop.cuh"
#include "decode/shared_storage.cuh"

namespace attune::decode {

constexpr float kUndoMaxOffset = 1.0f / (1 << static_cast<int>(kMaxOffset));

// Row statistics of the warps, [warp][row] in shared memory.
struct WarpStats {
  float* row_max;
  float* row_sum;
  float* pv_max;
  float* o_rescale;  // overlays row_sum once that has been read
  __device__ __forceinline__ explicit WarpStats(SharedStorage& shared) {
    row_max = shared.row_max[0];
    row_sum = shared.row_sum[0];
    pv_max = shared.pv_max[0];
    o_rescale = shared.o_rescale[0];
  }

  __device__ __forceinline__ float block_max(int row) const {
    float result = -ptx::infinity();
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) result = fmaxf(result, row_max[w * Config::kRows + row]);
    return result;
  }
  __device__ __forceinline__ float block_sum(int row, float row_max_ref) const {
    float result = 0;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      const int at = w * Config::kRows + row;
      result += row_sum[at] * ptx::exp2_approx(row_max[at] - row_max_ref);
    }
    return result;
  }
  // The rescale factor of a warp's O in the block's O, without the scale of V. at: warp * kRows + row.
  __device__ __forceinline__ float rescale_of_warp(int at, float row_max_ref) const {
    constexpr float kUnit = kUndoMaxOffset * (Config::kNewTokens ? 1.0f : common::code_unit<Config::kKvType>());
    return kUnit * ptx::exp2_approx((Config::kKeyFactors ? pv_max[at] : row_max[at]) - row_max_ref);
  }
};

// The scale of cached values per tensor or per head, which the epilogue applies; otherwise 1.
__device__ __forceinline__ float epilogue_v_scale(const AttentionParams& p, int head) {
  float factor = 1.0f;
  if (Config::kNewTokens) return factor;
  if (p.v_scale.mode == ScaleMode::kTensor) factor = p.v_scale.data[0];
  if (p.v_scale.mode == ScaleMode::kHead) factor = p.v_scale.data[head * p.v_scale.head_stride];
  return factor;
}

// Four channels of a row, summed over the warps. exchange: [kWarps][kRows] rows of `pitch` floats.
__device__ __forceinline__ float4 sum_over_warps(const float* exchange, int pitch, int row, int channel) {
  float4 sum{0, 0, 0, 0};
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    const float4 x = *reinterpret_cast<const float4*>(exchange + (w * Config::kRows + row) * pitch + channel);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  return sum;
}

// Where a block stores the partial result of a split: rows of head_dim_v floats, and rows of (row_max, row_sum). out
// null: the block has the whole output tile and stores the output.
struct PartialAddress {
  float* out;
  float* stats;
};

__device__ __forceinline__ void store_warp_stats(const AttentionState& state, const WarpStats& stats) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float row_sum = kUndoMaxOffset * sum_over_keys(state.row_sum[n][e]);
      const int at = warp * Config::kRows + 8 * n + lane % 4 * 2 + e;
      if (lane >= 4) continue;
      stats.row_max[at] = state.row_max[n][e];
      stats.row_sum[at] = row_sum;
      if constexpr (Config::kKeyFactors) stats.pv_max[at] = state.pv_max[n][e];
    }
  }
}

// One thread for each row: merges the warps' statistics, stores them, and writes the factor of each warp's O to shared
// memory.
__device__ __forceinline__ void merge_row_stats(const AttentionParams& p, const Split& split, long long q_begin,
                                                const PartialAddress& partial, const WarpStats& stats, int row) {
  const float row_max = stats.block_max(row), row_max_ref = finite_row_max(row_max),
              row_sum = stats.block_sum(row, row_max_ref);
  float factor = epilogue_v_scale(p, split.head);
  if (row < split.num_rows) {
    if (partial.out == nullptr) {
      const int packed = split.row_begin + row, query = kernels::divide(packed, p.by_group);
      const float normalise = common::finish_row(p, split.batch, q_begin, query,
                                                 split.head * p.group + packed - query * p.group, row_max, row_sum);
      factor = row_max == -ptx::infinity() && row_sum == 0 ? 0.0f : factor * normalise;
    } else {
      partial.stats[2 * row] = row_max;
      partial.stats[2 * row + 1] = row_sum;
    }
  }
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    const int at = w * Config::kRows + row;
    stats.o_rescale[at] = factor * stats.rescale_of_warp(at, row_max_ref);
  }
}

// Writes each warp's rescaled O to the exchange: kMergeChannels channels of every row, from block first_block (of 16
// channels) on. o_rescale: of rows 8 n + 2 t and the next.
__device__ __forceinline__ void store_warp_o(const AttentionState& state,
                                             const float (&o_rescale)[Config::kRowTiles][2], float* exchange,
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
        exchange[(warp * Config::kRows + 8 * n + 2 * t + j % 2) * Config::kMergePitch +
                 common::channel_of_row<Config::kKvType>(local, g, j / 2)] = state.o[i][n][j] * o_rescale[n][j % 2];
      }
    }
  }
}

// What a thread stores of the exchanged channels: groups of four, each of one row.
class OutputGroups {
 public:
  __device__ __forceinline__ OutputGroups(const AttentionParams& p, const Split& split, long long q_begin) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int packed = split.row_begin + row(i), query = kernels::divide(packed, p.by_group);
      out_at_[i] = common::row_offset(p, split.batch, q_begin, query, split.head * p.group + packed - query * p.group,
                                      p.out_batch_stride, p.out_row_stride, p.out_head_stride);
    }
  }

  // Sums the exchanged channels over the warps and stores them to the output or the partial result.
  __device__ __forceinline__ void store(const AttentionParams& p, const Split& split, const PartialAddress& partial,
                                        const float* exchange, int first_channel) const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int local = number(i) % kOfRow * 4, channel = first_channel + local;
      if (number(i) >= kGroups || row(i) >= split.num_rows || channel >= Config::kHeadDimV) continue;
      const float4 sum = sum_over_warps(exchange, Config::kMergePitch, row(i), local);
      if (partial.out != nullptr) {
        *reinterpret_cast<float4*>(partial.out + row(i) * Config::kHeadDimV + channel) = sum;
      } else {
        common::store_four<Config::kOutType>(p.out, out_at_[i] + channel * p.out_dim_stride, p.out_dim_stride, sum);
      }
    }
  }

 private:
  static constexpr int kOfRow = Config::kMergeChannels / 4, kGroups = Config::kRows * kOfRow,
                       kOfThread = (kGroups + Config::kThreads - 1) / Config::kThreads;
  __device__ __forceinline__ static int number(int i) { return static_cast<int>(threadIdx.x) + i * Config::kThreads; }
  __device__ __forceinline__ static int row(int i) { return number(i) / kOfRow; }

  long long out_at_[kOfThread];  // the first element of each group's row
};

// The whole epilogue. It synchronises the block, but not at its end.
__device__ __forceinline__ void epilogue(const AttentionParams& p, const Split& split, long long q_begin,
                                         const PartialAddress& partial, const AttentionState& state,
                                         SharedStorage& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const WarpStats stats(shared);
  float* const exchange = shared.exchange[0];
  store_warp_stats(state, stats);
  const OutputGroups groups(p, split, q_begin);
  __syncthreads();
  for (int row = threadIdx.x; row < Config::kRows; row += Config::kThreads)
    merge_row_stats(p, split, q_begin, partial, stats, row);
  __syncthreads();
  float o_rescale[Config::kRowTiles][2];
#pragma unroll
  for (int n = 0; n < Config::kRowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) o_rescale[n][e] = stats.o_rescale[warp * Config::kRows + 8 * n + lane % 4 * 2 + e];
  }
#pragma unroll
  for (int block = 0; block < Config::kBlocksV; block += Config::kMergeChannels / 16) {
    if (block != 0) __syncthreads();
    store_warp_o(state, o_rescale, exchange, block);
    __syncthreads();
    groups.store(p, split, partial, exchange, block * 16);
  }
}

}  // namespace attune::decode
