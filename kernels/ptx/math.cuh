// SPDX-License-Identifier: Apache-2.0
// Approximate functions with errors of about 2^-22: PTX ISA, "ex2", "lg2", "rcp" and "sqrt". And "max".
#pragma once

#include "ptx/architecture.h"

namespace attune::ptx {

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// 2^x; subnormal results become 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}
__device__ __forceinline__ float log2_approx(float x) {
  float d;
  asm("lg2.approx.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ float sqrt_approx(float x) {
  float d;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// The maximum; NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(x), "f"(y));
  return d;
}
// The maximum of each 16-bit half, unsigned.
__device__ __forceinline__ unsigned max_u16x2(unsigned x, unsigned y) {
  if constexpr (has(kPairMaximum)) {
    unsigned d;
    asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(x), "r"(y));
    return d;
  } else {
    return max(x & 0xffffu, y & 0xffffu) | max(x >> 16, y >> 16) << 16;
  }
}

}  // namespace attune::ptx
