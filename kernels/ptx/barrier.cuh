// SPDX-License-Identifier: Apache-2.0
// mbarriers, which count arrivals and bytes (PTX ISA, "mbarrier"); named barriers, for some threads of a block ("bar");
// proxy fences between ordinary and asynchronous accesses ("fence").
#pragma once

namespace attune::ptx {

// barrier: the shared address of an mbarrier of 8 bytes. A phase completes after `count` arrivals and all expected
// bytes.
__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Called by the thread that initialised the mbarriers, before other threads or TMA use them. A block barrier must
// follow.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and adds the bytes that the phase expects from copies.
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
// The same without blocking; phase_ended() may suspend the thread.
__device__ __forceinline__ bool phase_has_ended(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits until the phase of that parity has completed. The first phase is 0; on a new mbarrier parity 1 has completed.
__device__ __forceinline__ void wait_phase(unsigned barrier, unsigned parity) {
  while (!phase_ended(barrier, parity)) {
  }
}

// Named barriers: id is 1 to 15 (0 is __syncthreads), threads a multiple of 32. sync waits for all threads, arrive does
// not wait. "bar" is "barrier" with .aligned: all threads of a warp must execute the same instruction, converged;
// different warps may execute different instructions. Without .aligned the warp votes first, and ptxas duplicates the
// code after the barrier for diverged warps (200 instructions more in prefill.cu).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// "barrier" without .aligned, for roles of a block that execute different instructions.
__device__ __forceinline__ void named_barrier_sync_unaligned(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive_unaligned(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Named-barrier sync with a reduction: true if x is true in any thread.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(x ? 1 : 0), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders writes to global memory that are visible to this thread before TMA reads that it issues.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Orders this thread's writes to shared memory before TMA or wgmma accesses after a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace attune::ptx
