// SPDX-License-Identifier: Apache-2.0
// cp.async: copies from global to shared memory that do not pass through registers. PTX ISA, "cp.async".
#pragma once

namespace attune::ptx {

// 32-bit address of a pointer into shared memory.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes (4, 8 or 16). The first `valid` bytes are read, the others become zero; with valid = 0 nothing is read.
// Copies of 16 bytes bypass L1. L2 prefetches 128 bytes, because rows of a cache are read to their end.
template <int kBytes>
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, unsigned valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid)
                 : "memory");
  }
}

// The same, through L1. A copy of 16 bytes that bypasses L1 fetches a whole sector of 32 bytes, unless the other half
// of the sector goes to the same 32 bytes of shared memory.
template <int kBytes>
__device__ __forceinline__ void copy_async_cached(unsigned shared, const void* global, unsigned valid) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes),
               "r"(valid)
               : "memory");
}

// The L2 policy evict_first, for data that is read once. It becomes a constant in SASS. PTX ISA, "createpolicy".
__device__ __forceinline__ unsigned long long evict_first_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The same, with an L2 policy.
template <int kBytes>
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, unsigned valid,
                                           unsigned long long policy) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
                 "r"(valid), "l"(policy)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint.L2::128B [%0], [%1], 8, %2, %3;" ::"r"(shared), "l"(global),
                 "r"(valid), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint.L2::128B [%0], [%1], 4, %2, %3;" ::"r"(shared), "l"(global),
                 "r"(valid), "l"(policy)
                 : "memory");
  }
}

// Prefetches the 128 bytes around an address to L2. PTX ISA, "prefetch".
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

// Loads data that no kernel writes meanwhile. They are volatile, so that the compiler does not move them down to their
// uses. PTX ISA, "ld.global.nc".
__device__ __forceinline__ unsigned load_early(const unsigned* global) {
  unsigned x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(global));
  return x;
}
__device__ __forceinline__ unsigned load_early(const unsigned short* global) {
  unsigned short x;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(global));
  return x;
}
// Loads 16 bytes and does not allocate in L1.
__device__ __forceinline__ void load_early_four(const void* global, unsigned (&x)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(global));
}

// Commits the copies that this thread has issued since its last commit, as a group that may be empty.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Arrives at an mbarrier (ptx/barrier.cuh) once this thread's earlier copies have completed. The mbarrier's count
// includes this arrival (.noinc). PTX ISA, "cp.async.mbarrier.arrive".
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until at most the kPending youngest groups of this thread are incomplete.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace attune::ptx
