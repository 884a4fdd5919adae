// SPDX-License-Identifier: Apache-2.0
// Combines the partial results of an output tile whose splits belong to several blocks.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L,  over the splits in the order
//   of their keys
//
// The order is fixed, so the result has the same bits in every run, whichever block combines.
#pragma once

#include "common/lanes.cuh"
#include "decode/epilogue.cuh"
#include "ptx/atomic.cuh"
#include "scheduler/stream_k_partition.cuh"

namespace attune::decode {

__device__ __forceinline__ int range_of_block(const AttentionParams& p) {
  return static_cast<int>(blockIdx.x / static_cast<unsigned>(p.head_lanes));
}
// The block of this block's head lane for a range.
__device__ __forceinline__ int block_of_range(const AttentionParams& p, int range) {
  return range * p.head_lanes + scheduler::head_lane(p);
}

// Partial results in the workspace, which stay in L2. A block has two slots: one for an output tile that began in an
// earlier block, one for an output tile that continues in the next. Counting ranges as blocks, the splits of an output
// tile that begins in block c are in slots 2c + 1, 2(c + 1), 2(c + 2)...
struct GlobalPartials {
  static constexpr bool kMany = true;  // there may be more than 32
  const AttentionParams& p;
  int first_range, count;

  __device__ __forceinline__ static PartialAddress address(const AttentionParams& p, bool is_first, int range) {
    const long long row = (2ll * block_of_range(p, range) + (is_first ? 1 : 0)) * Config::kRows;
    return {p.partial_out + row * Config::kHeadDimV, p.partial_stats + 2 * row};
  }
  __device__ __forceinline__ float2 stats(int i, int row) const {
    return ptx::load_from_l2(reinterpret_cast<const float2*>(address(p, i == 0, first_range + i).stats + 2 * row));
  }
  __device__ __forceinline__ float4 out(int i, int row, int channel) const {
    return ptx::load_from_l2(
        reinterpret_cast<const float4*>(address(p, i == 0, first_range + i).out + row * Config::kHeadDimV + channel));
  }
};

// Counts this block's split of the output tile. Returns true, in all threads, if all splits have been stored.
__device__ __forceinline__ bool arrive(const AttentionParams& p, int first_range, int num_splits, int& is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::count_arrival(p.arrivals + block_of_range(p, first_range), num_splits - 1) ==
                      static_cast<unsigned>(num_splits - 1)
                  ? 1
                  : 0;
  }
  __syncthreads();
  return is_last != 0;
}

// One warp combines one row.
template <class Partials>
__device__ __forceinline__ void combine_row(const AttentionParams& p, const Split& split, long long q_begin,
                                            const Partials& partials, int row) {
  constexpr int kVectors = (Config::kHeadDimV + 127) / 128;  // vectors of four channels for each lane
  const int lane = threadIdx.x % 32;
  // Each lane rescales one split. More than 32 splits take several rounds; the stats of the first round are kept.
  float2 first_stats{-ptx::infinity(), 0};
  if (lane < partials.count) first_stats = partials.stats(lane, row);
  float row_max = first_stats.x;
  for (int i = 32 + lane; Partials::kMany && i < partials.count; i += 32)
    row_max = fmaxf(row_max, partials.stats(i, row).x);
  row_max = common::max_of_lanes(row_max);
  const float row_max_ref = finite_row_max(row_max);

  float row_sum = 0;
  float4 o[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) o[v] = {0, 0, 0, 0};
  for (int first = 0; first < (Partials::kMany ? partials.count : 1); first += 32) {
    float2 stats = first_stats;
    if (first > 0)
      stats = first + lane < partials.count ? partials.stats(first + lane, row) : float2{-ptx::infinity(), 0};
    const float o_rescale = ptx::exp2_approx(stats.x - row_max_ref), rescaled_sum = o_rescale * stats.y;
    const int count = min(32, partials.count - first);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float w = __shfl_sync(0xffffffffu, o_rescale, i);
      row_sum += __shfl_sync(0xffffffffu, rescaled_sum, i);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int channel = (v * 32 + lane) * 4;
        if (channel >= Config::kHeadDimV) continue;
        const float4 x = partials.out(first + i, row, channel);
        o[v].x += w * x.x, o[v].y += w * x.y, o[v].z += w * x.z, o[v].w += w * x.w;
      }
    }
  }

  const int packed = split.row_begin + row, query = kernels::divide(packed, p.by_group),
            head = split.head * p.group + packed - query * p.group;
  float factor = 0;
  if (lane == 0) factor = common::finish_row(p, split.batch, q_begin, query, head, row_max, row_sum);
  factor = __shfl_sync(0xffffffffu, factor, 0);
  const long long at =
      common::row_offset(p, split.batch, q_begin, query, head, p.out_batch_stride, p.out_row_stride, p.out_head_stride);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int channel = (v * 32 + lane) * 4;
    if (channel >= Config::kHeadDimV) continue;
    o[v].x *= factor, o[v].y *= factor, o[v].z *= factor, o[v].w *= factor;
    common::store_four<Config::kOutType>(p.out, at + channel * p.out_dim_stride, p.out_dim_stride, o[v]);
  }
}

// The last block to arrive combines all splits of the output tile. Which block that is varies between runs.
__device__ __forceinline__ void combine_if_last(const AttentionParams& p, const Split& split, long long q_begin,
                                                const kernels::StreamKRange& range, int& is_last) {
  const scheduler::StreamKPartition partition(range.blocks, range.total_tiles);
  const int first = split.is_first ? range_of_block(p) : partition.block_of(split.output_tile_begin);
  const int last = split.is_last ? range_of_block(p) : partition.block_of(split.output_tile_end - 1);
  const GlobalPartials partials{p, first, last - first + 1};
  if (!arrive(p, first, partials.count, is_last)) return;
  for (int row = threadIdx.x / 32; row < split.num_rows; row += Config::kWarps)
    combine_row(p, split, q_begin, partials, row);
}

}  // namespace attune::decode
