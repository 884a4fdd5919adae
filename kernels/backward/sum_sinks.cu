// SPDX-License-Identifier: Apache-2.0
// dsinks of the sums that row_stats.cu has made, always in the same order. Grid: query heads.
#include "backward/sinks.cuh"
#include "ptx/grid.cuh"

namespace attune::backward {

constexpr int kThreads = 256;

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(attune::backward::kThreads)
    attune_backward_sum_sinks(const __grid_constant__ attune::kernels::SinkSumParams p) {
  using namespace attune;
  using namespace attune::backward;
  ptx::wait_for_previous_kernels();
  const int head = static_cast<int>(blockIdx.x);
  // A warp has a sequence; of many, a thread has one.
  const int lanes = p.batch < kThreads ? 32 : 1;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  float sum = 0;
  for (int b = static_cast<int>(threadIdx.x) / lanes; b < p.batch; b += kThreads / lanes) {
    const SequenceInfo s = read_sequence(p, b);
    for (int row = lane * kBackwardRows; row < s.num_q; row += lanes * kBackwardRows)
      sum += sink_sum_at(p, s, b, head, row);
  }
  sum = sum_of_block<kThreads>(sum);
  if (threadIdx.x == 0) p.dsinks[head * p.dsinks_stride] = -sum;
}
