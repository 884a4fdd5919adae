// SPDX-License-Identifier: Apache-2.0
// Sums over a cluster through distributed shared memory: out[cluster] = the sum of `in` over the cluster's blocks. Each
// block fills all of its dynamic shared memory, so that the test fails if a launch gets less than it asked for.
#include "ptx/cluster.cuh"
#include "selftest/types.h"

using namespace attune;

extern __shared__ u32 s_values[];  // [words]

// in [grid], out [grid / cluster]
extern "C" __global__ void __launch_bounds__(128) cluster_sum(const u32* in, u32* out, u32 words) {
  for (u32 i = threadIdx.x; i < words; i += blockDim.x) s_values[i] = in[blockIdx.x] + i;
  ptx::cluster_barrier();
  if (ptx::cluster_rank() == 0 && threadIdx.x == 0) {
    u32 sum = 0;
    // The last word of the shared memory that was asked for.
    u32* const last = s_values + words - 1;
    for (int rank = 0; rank < ptx::cluster_size(); ++rank) sum += *ptx::in_block(last, rank) - (words - 1);
    out[blockIdx.x / ptx::cluster_size()] = sum;
  }
  // No block may exit while another reads its shared memory.
  ptx::cluster_barrier();
}
