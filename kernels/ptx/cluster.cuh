// SPDX-License-Identifier: Apache-2.0
// Blocks of one cluster: ranks, their barrier, and each other's shared memory. PTX ISA, "%cluster_ctarank",
// "barrier.cluster", "mapa".
#pragma once

namespace attune::ptx {

__device__ __forceinline__ int cluster_rank() {
  unsigned x;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return static_cast<int>(x);
}
__device__ __forceinline__ int cluster_size() {
  unsigned x;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(x));
  return static_cast<int>(x);
}

// All threads of all blocks. What they wrote before it is visible after it.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another block, as an address that ordinary loads take.
template <class T>
__device__ __forceinline__ const T* in_block(const T* shared, int rank) {
  unsigned long long at;
  asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(reinterpret_cast<unsigned long long>(shared)), "r"(rank));
  return reinterpret_cast<const T*>(at);
}

}  // namespace attune::ptx
