// SPDX-License-Identifier: Apache-2.0
// Sums of blocks of queries for dsinks and dt5_bias, which sum_blocks.cu adds up.
#pragma once

#include "backward/rows.cuh"

namespace attune::backward {

// The index of the sum, in entry `line` of `sums`, of the block of queries that begins at query `row`. Indices of
// sequences do not overlap.
__device__ __forceinline__ long long block_sum_at(const BackwardParams& p, const SequenceInfo& s, int b, long long line,
                                                  int row) {
  const long long first = p.cu_seqlens_q.data != nullptr ? s.q_begin : static_cast<long long>(b) * p.fixed_q;
  return line * (p.total_q / kBackwardRows + p.batch) + first / kBackwardRows + b + row / kBackwardRows;
}

// Adds the numbers of a block's threads in a fixed order. Thread 0 gets the sum.
template <int kThreads>
__device__ __forceinline__ float sum_of_block(float x) {
  __shared__ float of_warp[kThreads / 32];
  x = sum_of_lanes(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (const float each : of_warp) sum += each;
  return sum;
}

}  // namespace attune::backward
