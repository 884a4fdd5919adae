// SPDX-License-Identifier: Apache-2.0
// Clusters: ranks of blocks, the cluster barrier, and distributed shared memory (DSMEM). PTX ISA, "%cluster_ctarank",
// "barrier.cluster", "mapa", "mbarrier.arrive", "st.async".
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

// Cluster arrive and wait, by all threads of all blocks, with release and acquire. The release waits for all earlier
// writes of the thread, also to global memory.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The two halves of cluster_barrier().
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A generic pointer to the same object in the shared memory of another block.
template <class T>
__device__ __forceinline__ T* in_block(T* shared, int rank) {
  unsigned long long at;
  asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(reinterpret_cast<unsigned long long>(shared)), "r"(rank));
  return reinterpret_cast<T*>(at);
}

// The same for 32-bit shared addresses. Offsets from the address stay valid within that block's shared memory.
__device__ __forceinline__ unsigned shared_in_block(unsigned shared, int rank) {
  unsigned at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared), "r"(rank));
  return at;
}

// barrier: an mbarrier of any block of the cluster, from shared_in_block(). The release has block scope: at cluster
// scope it would wait for all writes of the thread.
__device__ __forceinline__ void arrive_in_cluster(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores 4 bytes to another block's shared memory (DSMEM). The bytes complete at an mbarrier of that block.
__device__ __forceinline__ void store_async(unsigned at, unsigned x, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at), "r"(x),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_async_four(unsigned at, const float4& x, unsigned barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
      "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)), "r"(__float_as_uint(x.w)),
      "r"(barrier)
      : "memory");
}
// Copies bytes, a multiple of 16, from this block's shared memory to another block's. They complete at an mbarrier of
// that block. The threads that wrote the data must have called fence_async_proxy(). PTX ISA, "cp.async.bulk".
__device__ __forceinline__ void copy_to_block(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace attune::ptx
