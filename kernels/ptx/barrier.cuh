// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that also count bytes (PTX ISA, "mbarrier"), numbered barriers of some of a block's threads
// ("bar"), and the fences between ordinary and asynchronous accesses ("fence").
#pragma once

namespace attune::ptx {

// barrier: shared address of 8 bytes. A phase ends when `count` arrivals and all expected bytes have come.
__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// By the thread that initialised, before others (the copy engine too) use the barriers; a barrier of the block follows.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and the bytes that copies of this phase will bring.
__device__ __forceinline__ void arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool phase_ended(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// The same without waiting at all, where that one may for a while.
__device__ __forceinline__ bool phase_has_ended(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits for the end of the phase of that parity; phases count from 0. A new barrier counts as past phase 1.
__device__ __forceinline__ void wait_phase(unsigned barrier, unsigned parity) {
  while (!phase_ended(barrier, parity)) {
  }
}

// Barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads, a multiple of 32: wait for all, or count without
// waiting. "bar" is "barrier" with .aligned: all threads of a warp come by the same instruction, converged. Warps may
// come by different ones. Without .aligned a warp votes first, and ptxas keeps a second copy of what follows for
// diverged ones (200 instructions more in prefill.cu).
__device__ __forceinline__ void sync_some(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same where roles of a block meet that come by an instruction each, which is "barrier" without .aligned.
__device__ __forceinline__ void sync_roles(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_roles(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Waits for all, too: whether one of them gave true.
__device__ __forceinline__ bool any_of_some(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(x ? 1 : 0), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}
__device__ __forceinline__ void arrive_some(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Ordinary writes to global memory that this thread has seen, before it has the copy engine read them.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Ordinary writes to shared memory by this thread, before a barrier after which the copy engine or wgmma accesses it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace attune::ptx
