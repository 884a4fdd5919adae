// SPDX-License-Identifier: Apache-2.0
// Merges the parts of blocks of rows that were cut along the keys, in the order of the keys.
//
//   M = max_i m_i;  L = sum_i l_i 2^(m_i - M);  O = sum_i o_i 2^(m_i - M);  out = O / L, with sinks as everywhere
//
// A thread block has a row at a time, each thread four of its 512 channels. What waits for memory is read eight
// parts at a time.
#include "mla/mla_params.h"
#include "prefill/tiles.cuh"
#include "ptx/atomic.cuh"
#include "ptx/grid.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

constexpr int kRows = kernels::kMlaRowsOfBlock, kHeadDimV = kernels::kMlaHeadDimV, kAtATime = 4;

__device__ __forceinline__ void combine_row(const kernels::PrefillParams& p, const kernels::Task& t, int head_tile,
                                            int row) {
  const int local = row / p.heads_of_tile;
  if (local >= t.num_tokens) return;
  const int token = t.token_begin + local, head = head_tile * p.heads_of_tile + row - local * p.heads_of_tile;
  const int channel = 4 * static_cast<int>(threadIdx.x);
  const auto at = [&](int part) {
    return (static_cast<long long>(t.first_part + part) * p.num_head_tiles + head_tile) * kRows + row;
  };
  float max = -ptx::infinity(), sum = 0;
  float4 o = make_float4(0, 0, 0, 0);
  for (int first = 0; first < t.num_parts; first += kAtATime) {
    float2 stats[kAtATime];
    float4 x[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      stats[i] = make_float2(-ptx::infinity(), 0), x[i] = make_float4(0, 0, 0, 0);
      if (first + i >= t.num_parts) continue;
      stats[i] = ptx::load_from_l2(reinterpret_cast<const float2*>(p.partial_stats + 2 * at(first + i)));
      x[i] = ptx::load_from_l2(reinterpret_cast<const float4*>(p.partial_out + at(first + i) * kHeadDimV + channel));
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      if (first + i >= t.num_parts) continue;
      const float top = fmaxf(max, stats[i].x), reference = top == -ptx::infinity() ? 0.0f : top;
      const float lowered = ptx::exp2_approx(max - reference), weight = ptx::exp2_approx(stats[i].x - reference);
      max = top;
      sum = sum * lowered + weight * stats[i].y;
      o.x = o.x * lowered + weight * x[i].x, o.y = o.y * lowered + weight * x[i].y;
      o.z = o.z * lowered + weight * x[i].z, o.w = o.w * lowered + weight * x[i].w;
    }
  }
  const float factor = tile::finish_row(p, t.batch, t.q_begin, token, head, max, sum, threadIdx.x == 0);
  const long long to = tile::row_offset(p, t.batch, t.q_begin, token, head, p.out_batch_stride, p.out_row_stride,
                                        p.out_head_stride) +
                       channel * p.out_dim_stride;
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to, o.x * factor);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + p.out_dim_stride, o.y * factor);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + 2 * p.out_dim_stride, o.z * factor);
  tile::store_element(ATTUNE_OUT_TYPE, p.out, to + 3 * p.out_dim_stride, o.w * factor);
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(128)
    attune_combine_mla(const __grid_constant__ attune::kernels::PrefillParams p) {
  using namespace attune;
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  const int rows = p.list->num_splits * p.num_head_tiles * mla::kRows;
  for (int i = static_cast<int>(blockIdx.x); i < rows; i += static_cast<int>(gridDim.x)) {
    const int row = i % mla::kRows, pair = i / mla::kRows, head_tile = pair % p.num_head_tiles;
    mla::combine_row(p, p.split_tasks[pair / p.num_head_tiles], head_tile, row);
  }
}
