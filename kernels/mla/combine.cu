// SPDX-License-Identifier: Apache-2.0
// Merges the parts of blocks of rows that were cut along the keys, in a fixed order.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L, with sinks as everywhere
//
// A group of threads has a row at a time, a thread four of its 512 channels. Where there are hardly more rows than thread
// blocks, the four groups of a block share a row: each has every fourth part, and the first merges the four. All that a
// thread waits for is requested together, up to six parts at a time.
#include "mla/mla_params.h"
#include "prefill/tiles.cuh"
#include "ptx/atomic.cuh"
#include "ptx/grid.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

constexpr int kRows = kernels::kMlaRowsOfBlock, kHeadDimV = kernels::kMlaHeadDimV, kAtATime = 6;
constexpr int kGroups = kernels::kMlaMergeThreads / 128;

// Some parts of a row: four channels.
struct Merged {
  float max = -ptx::infinity(), sum = 0;
  float4 o = {0, 0, 0, 0};
  __device__ __forceinline__ void add(const float2& stats, const float4& x) {
    const float top = fmaxf(max, stats.x), reference = top == -ptx::infinity() ? 0.0f : top;
    const float lowered = ptx::exp2_approx(max - reference), weight = ptx::exp2_approx(stats.x - reference);
    max = top;
    sum = sum * lowered + weight * stats.y;
    o.x = o.x * lowered + weight * x.x, o.y = o.y * lowered + weight * x.y;
    o.z = o.z * lowered + weight * x.z, o.w = o.w * lowered + weight * x.w;
  }
};

// kSharing: groups that share the row.
template <int kSharing>
__device__ __forceinline__ void combine_row(const kernels::PrefillParams& p, const kernels::Task& t, int head_tile,
                                            int row) {
  __shared__ float2 group_stats[kGroups];
  __shared__ float4 group_out[kGroups][128];
  const int local = row / p.heads_of_tile;
  if (local >= t.num_tokens) return;
  const int token = t.token_begin + local, head = head_tile * p.heads_of_tile + row - local * p.heads_of_tile;
  const int group = static_cast<int>(threadIdx.x) / 128 % kSharing, four = static_cast<int>(threadIdx.x) % 128,
            channel = 4 * four;
  const auto at = [&](int part) {
    return (static_cast<long long>(t.first_part + part) * p.num_head_tiles + head_tile) * kRows + row;
  };
  Merged merged;
  for (int first = group; first < t.num_parts; first += kSharing * kAtATime) {
    float2 stats[kAtATime];
    float4 x[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int part = first + i * kSharing;
      stats[i] = make_float2(-ptx::infinity(), 0), x[i] = make_float4(0, 0, 0, 0);
      if (part >= t.num_parts) continue;
      stats[i] = ptx::load_from_l2(reinterpret_cast<const float2*>(p.partial_stats + 2 * at(part)));
      x[i] = ptx::load_from_l2(reinterpret_cast<const float4*>(p.partial_out + at(part) * kHeadDimV + channel));
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      if (first + i * kSharing < t.num_parts) merged.add(stats[i], x[i]);
    }
  }
  if constexpr (kSharing > 1) {
    if (four == 0) group_stats[group] = make_float2(merged.max, merged.sum);
    group_out[group][four] = merged.o;
    __syncthreads();
    if (group != 0) return;
#pragma unroll
    for (int i = 1; i < kSharing; ++i) merged.add(group_stats[i], group_out[i][four]);
  }
  const float factor = tile::finish_row(p, t.batch, t.q_begin, token, head, merged.max, merged.sum, four == 0);
  const long long to = tile::row_offset(p, t.batch, t.q_begin, token, head, p.out_batch_stride, p.out_row_stride,
                                        p.out_head_stride) +
                       channel * p.out_dim_stride;
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to, merged.o.x * factor);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + p.out_dim_stride, merged.o.y * factor);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + 2 * p.out_dim_stride, merged.o.z * factor);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + 3 * p.out_dim_stride, merged.o.w * factor);
}

// All rows, from `first` on every step-th.
template <int kSharing>
__device__ __forceinline__ void combine_rows(const kernels::PrefillParams& p, int rows_of_tile, int rows, int first,
                                             int step) {
  for (int i = first; i < rows; i += step) {
    const int row = i % rows_of_tile, pair = i / rows_of_tile, head_tile = pair % p.num_head_tiles;
    const kernels::Task task = p.split_tasks[pair / p.num_head_tiles];
    if (i == first) ptx::wait_for_previous_kernels();
    combine_row<kSharing>(p, task, head_tile, row);
    if (kSharing > 1) __syncthreads();
  }
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::kernels::kMlaMergeThreads, 2)
    attune_combine_mla(const __grid_constant__ attune::kernels::PrefillParams p) {
  using namespace attune;
  // The list is that of the schedule, which has ended: the attention began after it, and this kernel after that.
  const int tokens = p.cu_seqlens_q.data != nullptr ? p.tokens_of_tile : min(p.tokens_of_tile, p.fixed_q);
  const int rows_of_tile = tokens * p.heads_of_tile, rows = p.list->num_splits * p.num_head_tiles * rows_of_tile;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  if (rows <= 2 * blocks) {
    mla::combine_rows<mla::kGroups>(p, rows_of_tile, rows, block, blocks);
  } else {
    mla::combine_rows<1>(p, rows_of_tile, rows, block * mla::kGroups + static_cast<int>(threadIdx.x) / 128,
                         blocks * mla::kGroups);
  }
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
}
