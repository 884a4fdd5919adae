// SPDX-License-Identifier: Apache-2.0
// Conversions between element types, two at a time. PTX ISA, "cvt", "prmt"; "sub", "mul" and "fma" of half precision.
#pragma once

namespace attune::ptx {

// {lo, hi} rounded to nearest even, lo in the low half.
__device__ __forceinline__ unsigned pack_bf16(float lo, float hi) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ unsigned pack_f16(float lo, float hi) {
  unsigned d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

__device__ __forceinline__ float bf16_to_float(unsigned short x) {
  return __uint_as_float(static_cast<unsigned>(x) << 16);
}
__device__ __forceinline__ float f16_to_float(unsigned short x) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(x));
  return d;
}

// Rounds to TF32, ties away from zero; NaN stays NaN.
__device__ __forceinline__ unsigned round_to_tf32(float x) {
  unsigned d;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(d) : "f"(x));
  return d;
}

// Two 8-bit floats to fp16, exactly; NaN stays NaN. Only for architectures with kFp8Conversion; common/fp8.cuh has
// functions for all architectures.
__device__ __forceinline__ unsigned e4m3_to_f16(unsigned short x) {
  unsigned d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(x));
  return d;
}
// Four e4m3 numbers; x of the result has those of the two low bytes.
__device__ __forceinline__ uint2 four_e4m3_to_f16(unsigned x) {
  uint2 d;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.rn.f16x2.e4m3x2 %0, lo;\ncvt.rn.f16x2.e4m3x2 %1, hi;\n}"
      : "=r"(d.x), "=r"(d.y)
      : "r"(x));
  return d;
}
__device__ __forceinline__ unsigned e5m2_to_f16(unsigned short x) {
  unsigned d;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"(x));
  return d;
}
// {lo, hi} to two 8-bit floats, saturating; NaN stays NaN. As above, only with kFp8Conversion.
__device__ __forceinline__ unsigned short pack_e4m3(float lo, float hi) {
  unsigned short d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
  return d;
}
// Four numbers, the first in the lowest byte.
__device__ __forceinline__ unsigned pack_four_e4m3(float a, float b, float c, float d) {
  unsigned x;
  asm("{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n}"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}
__device__ __forceinline__ unsigned short pack_e5m2(float lo, float hi) {
  unsigned short d;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
  return d;
}

// Each nibble of selector picks a byte of {b, a}. If its top bit is set, it picks eight copies of that byte's sign bit.
__device__ __forceinline__ unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
  unsigned d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
__device__ __forceinline__ unsigned subtract_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ unsigned multiply_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// a * b + c, rounded once.
__device__ __forceinline__ unsigned multiply_add_f16x2(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ unsigned multiply_add_bf16x2(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

}  // namespace attune::ptx
