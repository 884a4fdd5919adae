// SPDX-License-Identifier: Apache-2.0
// Blocks of one cluster: ranks, their barrier, and each other's shared memory. PTX ISA, "%cluster_ctarank",
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

// All threads of all blocks. What they wrote before it is visible after it: arriving waits for all of the thread's
// writes everywhere.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The first step of it.
__device__ __forceinline__ void arrive_at_cluster_releasing() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// The same in two steps and without that: nothing but that all have come.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The same place in the shared memory of another block, as an address that ordinary loads and stores take.
template <class T>
__device__ __forceinline__ T* in_block(T* shared, int rank) {
  unsigned long long at;
  asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(reinterpret_cast<unsigned long long>(shared)), "r"(rank));
  return reinterpret_cast<T*>(at);
}

// The same for a 32-bit shared address; places in a block's shared memory keep their distances.
__device__ __forceinline__ unsigned shared_in_block(unsigned shared, int rank) {
  unsigned at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared), "r"(rank));
  return at;
}

// barrier: of any block of the cluster, by shared_in_block(). Orders nothing beyond the block: at cluster scope it
// would wait for all of the thread's writes everywhere.
__device__ __forceinline__ void arrive_in_cluster(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores 4 bytes in another block's shared memory, and counts them at that block's barrier once they are there.
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
// Copies bytes, a multiple of 16, of this block's shared memory to another block's, and counts them there. What this
// thread or others wrote needs a fence_async_proxy() by who wrote it. PTX ISA, "cp.async.bulk".
__device__ __forceinline__ void copy_to_block(unsigned to, unsigned from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace attune::ptx
