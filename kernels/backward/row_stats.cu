// SPDX-License-Identifier: Apache-2.0
// The stats of every row of q: its lse in base 2, and delta = <dout, out> - dlse. A warp has a row at a time. Grid:
// blocks of queries times query heads.
#include "backward/rows.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"

namespace attune::backward {

constexpr int kThreads = 256;
constexpr float kLog2e = 1.44269504088896341f;

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float delta_of(const BackwardParams& p, const SequenceInfo& s, int b, int row, int head) {
  const GradientRows& g = p.dout;
  const long long dout = q_offset(p, s, b, g.batch_stride, g.row_stride) + row * g.row_stride + head * g.head_stride;
  const long long out =
      q_offset(p, s, b, p.out_batch_stride, p.out_row_stride) + row * p.out_row_stride + head * p.out_head_stride;
  float sum = 0;
  for (int c = threadIdx.x % 32; c < ATTUNE_HEAD_DIM_V; c += 32) {
    sum += common::load_element(g.dtype, g.data, dout + c * g.dim_stride) *
           common::load_element(p.out_dtype, p.out, out + c * p.out_dim_stride);
  }
  sum = sum_of_lanes(sum);
  if (p.dlse == nullptr) return sum;
  return sum - p.dlse[q_offset(p, s, b, p.dlse_batch_stride, p.dlse_row_stride) + row * p.dlse_row_stride +
                      head * p.dlse_head_stride];
}

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(attune::backward::kThreads)
    attune_backward_row_stats(const __grid_constant__ attune::kernels::BackwardParams p) {
  using namespace attune;
  using namespace attune::backward;
  ptx::wait_for_previous_kernels();
  const int index = static_cast<int>(blockIdx.x) / p.num_heads_q, head = static_cast<int>(blockIdx.x) % p.num_heads_q;
  if (index >= p.q_list->num_tiles) return;
  const BackwardTile tile = tiles_of(p.q_list)[index];
  const SequenceInfo s = read_sequence(p, tile.batch);
  RowStats* const stats = stats_of(p, s, tile.batch, head);
  const int end = min(tile.begin + kBackwardRows, s.num_q);
  for (int row = tile.begin + static_cast<int>(threadIdx.x) / 32; row < end; row += kThreads / 32) {
    const float lse = p.lse[q_offset(p, s, tile.batch, p.lse_batch_stride, p.lse_row_stride) + row * p.lse_row_stride +
                            head * p.lse_head_stride];
    // A row that sees nothing gives nothing, whatever its dout holds.
    const bool blind = lse == -ptx::infinity();
    const float delta = blind ? 0.0f : delta_of(p, s, tile.batch, row, head);
    if (threadIdx.x % 32 == 0) stats[row] = {blind ? ptx::infinity() : lse * kLog2e, delta};
  }
}
