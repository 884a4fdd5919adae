// SPDX-License-Identifier: Apache-2.0
// Sums over a cluster through distributed shared memory: out[cluster] = sum of in over the cluster's blocks. Each block
// fills all of its dynamic shared memory, so that a launch with less than it asked for fails the test.
#include "selftest/types.h"

extern __shared__ u32 s_values[];  // [words]

__device__ inline u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline u32 cluster_size() {
  u32 size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline u32 load_from_rank(const u32* p, u32 rank) {
  u32 address, value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<u32>(__cvta_generic_to_shared(p))), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// in [grid], out [grid / cluster]
extern "C" __global__ void __launch_bounds__(128) cluster_sum(const u32* in, u32* out, u32 words) {
  for (u32 i = threadIdx.x; i < words; i += blockDim.x) s_values[i] = in[blockIdx.x] + i;
  cluster_sync();
  if (cluster_rank() == 0 && threadIdx.x == 0) {
    u32 sum = 0;
    // The last word: its address is the size that was asked for.
    for (u32 rank = 0; rank < cluster_size(); ++rank) sum += load_from_rank(s_values + words - 1, rank) - (words - 1);
    out[blockIdx.x / cluster_size()] = sum;
  }
  // No block may exit while another reads its shared memory.
  cluster_sync();
}
