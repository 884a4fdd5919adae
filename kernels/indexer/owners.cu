// SPDX-License-Identifier: Apache-2.0
// Finds the sequence of each row from cu_seqlens_q on the device:
//
//   offsets[b] = max over i <= b of clamp(cu_seqlens_q[i], 0, total);  owners[row] = b where offsets[b] <= row <
//   offsets[b + 1]
//
// Even an invalid table gives each row at most one sequence, and names no row that does not exist. Grid: one block. It
// computes a prefix maximum over the batch; then each thread finds its rows by bisection.
#include "indexer/rows.cuh"
#include "ptx/grid.cuh"

namespace attune::indexer {

constexpr int kThreads = ATTUNE_THREADS, kWarps = kThreads / 32;
static_assert(kThreads % 32 == 0 && kWarps <= 32, "a block of whole warps");

__device__ __forceinline__ int running_max(int x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, x, step);
    if (static_cast<int>(threadIdx.x % 32) >= step && other > x) x = other;
  }
  return x;
}

__device__ __forceinline__ void find_offsets(const IndexRows& p) {
  __shared__ int warp_max[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (long long base = 0; base <= p.batch; base += kThreads) {
    const long long j = base + threadIdx.x;
    int upto = running_max(j <= p.batch ? clamp_int(int_at(p.cu_seqlens, j), 0, p.total) : 0);
    if (lane == 31) warp_max[warp] = upto;
    __syncthreads();
    int next = before;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp && warp_max[w] > upto) upto = warp_max[w];
      if (warp_max[w] > next) next = warp_max[w];
    }
    if (j <= p.batch) p.offsets[j] = upto > before ? upto : before;
    before = next;
    __syncthreads();
  }
}

// If several sequences begin at the same row, the last one has it; the others are empty.
__device__ __forceinline__ int owner_by_offsets(const IndexRows& p, long long row) {
  if (row < p.offsets[0] || row >= p.offsets[p.batch]) return -1;
  int low = 0, high = p.batch;  // offsets[low] <= row < offsets[high]
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (p.offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace attune::indexer

extern "C" __global__ void __launch_bounds__(attune::indexer::kThreads)
    attune_index_owners(const __grid_constant__ attune::kernels::IndexRows p) {
  using namespace attune;
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  indexer::find_offsets(p);
  for (long long row = threadIdx.x; row < p.total; row += indexer::kThreads)
    p.owners[row] = indexer::owner_by_offsets(p, row);
}
