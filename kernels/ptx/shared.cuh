// SPDX-License-Identifier: Apache-2.0
// Loads from and stores to shared memory by 32-bit address. PTX ISA, "ld" and "st" with .shared.
#pragma once

namespace attune::ptx {

// The dynamic shared memory of the block.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char attune_shared[];
  return attune_shared;
}

__device__ __forceinline__ float load_shared(unsigned at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ float2 load_shared_pair(unsigned at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ unsigned load_shared_u32(unsigned at) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ unsigned short load_shared_u16(unsigned at) {
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ unsigned load_shared_u8(unsigned at) {
  unsigned x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_u32(unsigned at, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared_u16(unsigned at, unsigned short x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(x) : "memory");
}
// Stores the lowest byte of x.
__device__ __forceinline__ void store_shared_u8(unsigned at, unsigned x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared_two(unsigned at, unsigned x, unsigned y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
// Loads 16 bytes.
__device__ __forceinline__ void load_shared_four(unsigned at, unsigned (&x)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void store_shared_four(unsigned at, const unsigned* x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
// Stores 16 bytes of zeros.
__device__ __forceinline__ void store_shared_zero(unsigned at) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}

}  // namespace attune::ptx
