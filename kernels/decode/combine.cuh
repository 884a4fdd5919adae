// SPDX-License-Identifier: Apache-2.0
// The end of a pair that several blocks had parts of.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L,  over the parts in the order
//   of their keys
//
// so the same bits come out every time, whichever block does it.
#pragma once

#include "decode/merge.cuh"
#include "ptx/atomic.cuh"
#include "schedule/share.cuh"

namespace attune::decode {

__device__ __forceinline__ int share_of_block(const DecodeParams& p) {
  return static_cast<int>(blockIdx.x / static_cast<unsigned>(p.head_lanes));
}
// The block that has this block's lane of a share.
__device__ __forceinline__ int block_of_share(const DecodeParams& p, int share) {
  return share * p.head_lanes + schedule::head_lane(p);
}

// Parts in the workspace, where they never leave L2. They lie in slot 2c + 1 of the block c where the pair begins, then
// in slots 2(c + 1), 2(c + 2).. (counted in shares), so a block has one slot for the pair that came in from the block
// before and one for that which goes on.
struct GlobalParts {
  static constexpr bool kMany = true;  // more than 32
  const DecodeParams& p;
  int first_share, count;

  __device__ __forceinline__ static PartPlace place(const DecodeParams& p, bool starts, int share) {
    const long long row = (2ll * block_of_share(p, share) + (starts ? 1 : 0)) * Config::kRows;
    return {p.partial_out + row * Config::kHeadDimV, p.partial_stats + 2 * row};
  }
  __device__ __forceinline__ float2 stats(int i, int row) const {
    return ptx::load_from_l2(reinterpret_cast<const float2*>(place(p, i == 0, first_share + i).stats + 2 * row));
  }
  __device__ __forceinline__ float4 out(int i, int row, int channel) const {
    return ptx::load_from_l2(
        reinterpret_cast<const float4*>(place(p, i == 0, first_share + i).out + row * Config::kHeadDimV + channel));
  }
};

// Counts this block's part of the pair. True for the whole block if all parts are there now.
__device__ __forceinline__ bool arrive(const DecodeParams& p, int first_share, int parts, int& is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last =
        ptx::count_arrival(p.arrivals + block_of_share(p, first_share), parts - 1) == static_cast<unsigned>(parts - 1)
            ? 1
            : 0;
  }
  __syncthreads();
  return is_last != 0;
}

// One warp, one row.
template <class Parts>
__device__ __forceinline__ void combine_row(const DecodeParams& p, const Piece& piece, long long q_begin,
                                            const Parts& parts, int row) {
  constexpr int kVectors = (Config::kHeadDimV + 127) / 128;  // of four channels, a lane
  const int lane = threadIdx.x % 32;
  // Each lane weighs one part; more than 32 take more rounds, the first of which is kept.
  float2 first_stats{-ptx::infinity(), 0};
  if (lane < parts.count) first_stats = parts.stats(lane, row);
  float max = first_stats.x;
  for (int i = 32 + lane; Parts::kMany && i < parts.count; i += 32) max = fmaxf(max, parts.stats(i, row).x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
  const float reference = reference_of(max);

  float sum = 0;
  float4 o[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) o[v] = {0, 0, 0, 0};
  for (int first = 0; first < (Parts::kMany ? parts.count : 1); first += 32) {
    float2 stats = first_stats;
    if (first > 0) stats = first + lane < parts.count ? parts.stats(first + lane, row) : float2{-ptx::infinity(), 0};
    const float weight = ptx::exp2_approx(stats.x - reference), weighted = weight * stats.y;
    const int count = min(32, parts.count - first);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float w = __shfl_sync(0xffffffffu, weight, i);
      sum += __shfl_sync(0xffffffffu, weighted, i);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int channel = (v * 32 + lane) * 4;
        if (channel >= Config::kHeadDimV) continue;
        const float4 x = parts.out(first + i, row, channel);
        o[v].x += w * x.x, o[v].y += w * x.y, o[v].z += w * x.z, o[v].w += w * x.w;
      }
    }
  }

  const int packed = piece.row_begin + row, query = kernels::divide(packed, p.by_group),
            head = piece.head * p.group + packed - query * p.group;
  float factor = 0;
  if (lane == 0) factor = tile::finish_row(p, piece.batch, q_begin, query, head, max, sum);
  factor = __shfl_sync(0xffffffffu, factor, 0);
  const long long at =
      tile::row_offset(p, piece.batch, q_begin, query, head, p.out_batch_stride, p.out_row_stride, p.out_head_stride);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int channel = (v * 32 + lane) * 4;
    if (channel >= Config::kHeadDimV) continue;
    o[v].x *= factor, o[v].y *= factor, o[v].z *= factor, o[v].w *= factor;
    store_four(p, at + channel * p.out_dim_stride, o[v]);
  }
}

// The block that arrives last merges all parts of the pair. Which block that is differs from run to run.
__device__ __forceinline__ void combine_last(const DecodeParams& p, const Piece& piece, long long q_begin,
                                             const kernels::Share& share, int& is_last) {
  const schedule::Deal deal(share.blocks, share.total);
  const int first = piece.starts ? share_of_block(p) : deal.block_of(piece.pair_begin);
  const int last = piece.ends ? share_of_block(p) : deal.block_of(piece.pair_end - 1);
  const GlobalParts parts{p, first, last - first + 1};
  if (!arrive(p, first, parts.count, is_last)) return;
  for (int row = threadIdx.x / 32; row < piece.num_rows; row += Config::kWarps)
    combine_row(p, piece, q_begin, parts, row);
}

}  // namespace attune::decode
