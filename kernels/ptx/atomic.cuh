// SPDX-License-Identifier: Apache-2.0
// Synchronisation across blocks. PTX ISA, "atom"; "st" and "ld" with .release and .acquire; and "ld" with .cg, which
// bypasses L1.
#pragma once

namespace attune::ptx {

// Increments the counter, which wraps from `last` to 0; returns the old value. Acquire and release: writes that are
// visible to this thread become visible to threads that increment later.
__device__ __forceinline__ unsigned count_arrival(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

// Adds `count` and returns the old value. Acquire and release.
__device__ __forceinline__ unsigned add_arrivals(unsigned* counter, unsigned count) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(count) : "memory");
  return before;
}

// Adds one arrival. Release only.
__device__ __forceinline__ void release_arrival(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Release: writes that are visible to this thread become visible to threads that read x with load_acquire().
__device__ __forceinline__ void store_release(unsigned* at, unsigned x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* at) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

// Spins until the counter has reached `count`. The blocks that arrive must be resident.
__device__ __forceinline__ void wait_for_arrivals(const unsigned* counter, unsigned count) {
  while (load_acquire(counter) < count) {
  }
}
// Spins until another kernel, which must be running, has released a value other than x.
__device__ __forceinline__ void wait_for_change(const unsigned* at, unsigned x) {
  while (load_acquire(at) == x) {
  }
}

__device__ __forceinline__ float4 load_from_l2(const float4* at) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
// Zeros if it does not load. A branch around each of several loads would keep the compiler from issuing them together.
__device__ __forceinline__ float4 load_from_l2_if(bool loads, const float4* at) {
  float4 x;
  asm volatile(
      "{.reg .pred loads;\n setp.ne.s32 loads, %5, 0;\n"
      "mov.f32 %0, 0f00000000;\n mov.f32 %1, 0f00000000;\n mov.f32 %2, 0f00000000;\n mov.f32 %3, 0f00000000;\n"
      "@loads ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];}"
      : "=&f"(x.x), "=&f"(x.y), "=&f"(x.z), "=&f"(x.w)
      : "l"(at), "r"(loads ? 1 : 0)
      : "memory");
  return x;
}
__device__ __forceinline__ float2 load_from_l2(const float2* at) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(at) : "memory");
  return x;
}

}  // namespace attune::ptx
