// SPDX-License-Identifier: Apache-2.0
// Sums dsinks or dt5_bias over blocks of queries, always in the same order. Grid: entries.
#include "backward/block_sums.cuh"
#include "ptx/grid.cuh"

namespace attune::backward {

constexpr int kThreads = 256;

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(attune::backward::kThreads)
    attune_backward_sum_blocks(const __grid_constant__ attune::kernels::BlockSumParams p) {
  using namespace attune;
  using namespace attune::backward;
  ptx::wait_for_previous_kernels();
  const int line = static_cast<int>(blockIdx.x);
  // Each warp has a sequence; in large batches each thread has one.
  const int lanes = p.batch < kThreads ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  float sum = 0;
  for (int b = static_cast<int>(threadIdx.x) / lanes; b < p.batch; b += kThreads / lanes) {
    const SequenceInfo s = read_sequence(p, b);
    for (int row = lane * kBackwardRows; row < s.num_q; row += lanes * kBackwardRows)
      sum += p.sums[block_sum_at(p, s, b, line, row)];
  }
  sum = sum_of_block<kThreads>(sum);
  if (threadIdx.x == 0)
    p.to[line / p.entries * p.to_head_stride + line % p.entries * p.to_entry_stride] = p.factor * sum;
}
