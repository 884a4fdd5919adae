// SPDX-License-Identifier: Apache-2.0
// cp.async: copies from global to shared memory that do not pass through registers. PTX ISA, "cp.async".
#pragma once

namespace attune::ptx {

// 32-bit address of a pointer into shared memory.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes (4, 8 or 16) of which the first `valid` are read and the others become zero. valid 0 reads nothing. 16
// bytes go past L1. The L2 fetches 128 bytes at a time: rows of a cache are read to their end.
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

// As above, but all by way of L1. Past it 32 bytes are fetched for each copy of 16 but where the other half goes to the
// same 32 bytes of shared memory.
template <int kBytes>
__device__ __forceinline__ void copy_async_cached(unsigned shared, const void* global, unsigned valid) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes),
               "r"(valid)
               : "memory");
}

// What the L2 evicts before anything else: lines that are read once. A constant in SASS. PTX ISA, "createpolicy".
__device__ __forceinline__ unsigned long long evict_first_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As above, with a policy for the L2.
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

// Has the L2 fetch the 128 bytes around an address. PTX ISA, "prefetch".
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

// Loads of what nobody writes while the kernel runs, issued where they stand: the compiler does not move them to where
// their result is needed. PTX ISA, "ld.global.nc".
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
// 16 bytes, which no cache of the multiprocessor keeps.
__device__ __forceinline__ void load_early_four(const void* global, unsigned (&x)[4]) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(global));
}

// Closes a group of the copies that this thread has issued since the last one; it may be empty.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// An arrival at a barrier in shared memory (ptx/barrier.cuh) once this thread's copies so far are there; it is one of
// those that the barrier counts. PTX ISA, "cp.async.mbarrier.arrive".
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until at most kPending of this thread's groups, the youngest, are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace attune::ptx
