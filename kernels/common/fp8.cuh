// SPDX-License-Identifier: Apache-2.0
// Conversions of 8-bit floats. They give the same results with and without instructions for them.
#pragma once

#include "ptx/architecture.h"
#include "ptx/convert.cuh"

namespace attune::common {

// permute_bytes by these moves bytes 0, 1 of a word to the low bytes of two halves (then 2, 3; 0, 2; 1, 3), and eight
// copies of their signs to the high bytes.
constexpr unsigned kSigned01 = 0x9180, kSigned23 = 0xb3a2, kSigned02 = 0xa280, kSigned13 = 0xb391;

// Converts two e4m3 codes, as permuted so, to 2^-8 of their numbers in fp16, by arithmetic. Moved to their places in
// fp16, exponent and mantissa are that; NaN is 1.875. Only NaN overflows when it is multiplied by 36,000; that infinity
// times 0 is NaN.
constexpr float kE4m3Unit = 256.0f;
__device__ __forceinline__ unsigned signed_e4m3_to_small_f16(unsigned x) {
  constexpr unsigned kOver = 0x78657865u;  // 36,000
  const unsigned small = x << 7 & 0xbf80bf80u;
  return ptx::multiply_add_f16x2(ptx::multiply_f16x2(small, kOver), 0, small);
}
__device__ __forceinline__ unsigned signed_e4m3_to_f16(unsigned x) {
  constexpr unsigned kUnit = 0x5c005c00u;  // kE4m3Unit
  return ptx::multiply_f16x2(signed_e4m3_to_small_f16(x), kUnit);
}

// The same to bf16. Read as bf16, exponent and mantissa are 2^-120 of the number, and NaN reads as 480. Only NaN
// overflows when it is multiplied by 1.09375 * 2^119.
__device__ __forceinline__ unsigned signed_e4m3_to_bf16(unsigned x) {
  constexpr unsigned kUnit = 0x7b807b80u, kOver = 0x7b0c7b0cu, kMinusZero = 0x80008000u;
  const unsigned small = x << 4 & 0x87f087f0u;
  const unsigned number = ptx::multiply_add_bf16x2(small, kUnit, kMinusZero);
  return ptx::multiply_add_bf16x2(ptx::multiply_add_bf16x2(number, kOver, kMinusZero), 0, number);
}

// Rounds x to the nearest code with kMantissa mantissa bits and exponent bias kBias, ties to even. Saturates; NaN stays
// NaN.
template <int kMantissa, int kBias>
__device__ __forceinline__ unsigned encode_by_bits(float x, float largest) {
  constexpr int kShift = 23 - kMantissa;
  const float magnitude = fminf(fabsf(x), largest), smallest_normal = __uint_as_float((128u - kBias) << 23);
  // Adding a power of two whose last bit is the unit of subnormals rounds to that unit.
  const unsigned unit = (127u + 1 - kBias + kShift) << 23, bits = __float_as_uint(magnitude);
  const unsigned rounded = bits + (1u << (kShift - 1)) - 1 + (bits >> kShift & 1);
  const unsigned normal = (rounded >> kShift) - ((127u - kBias) << kMantissa);
  const unsigned subnormal = __float_as_uint(magnitude + __uint_as_float(unit)) - unit;
  const unsigned sign = __float_as_uint(x) >> 24 & 0x80;
  return (x == x ? magnitude < smallest_normal ? subnormal : normal : 0x7fu) | sign;
}

// Converts the two codes in `two` to fp16, exactly; NaN stays NaN.
__device__ __forceinline__ unsigned e4m3_to_f16(unsigned short two) {
  if constexpr (ptx::has(ptx::kFp8Conversion)) return ptx::e4m3_to_f16(two);
  return signed_e4m3_to_f16(ptx::permute_bytes(two, 0, kSigned01));
}
__device__ __forceinline__ unsigned e5m2_to_f16(unsigned short two) {
  if constexpr (ptx::has(ptx::kFp8Conversion)) return ptx::e5m2_to_f16(two);
  return ptx::permute_bytes(two, 0, 0x1404);  // the codes are the high bytes of fp16
}

// Rounds two numbers to codes, ties to even, lo in the low byte. Saturates; NaN stays NaN.
__device__ __forceinline__ unsigned short pack_e4m3(float lo, float hi) {
  if constexpr (ptx::has(ptx::kFp8Conversion)) return ptx::pack_e4m3(lo, hi);
  return static_cast<unsigned short>(encode_by_bits<3, 7>(lo, 448.0f) | encode_by_bits<3, 7>(hi, 448.0f) << 8);
}
__device__ __forceinline__ unsigned short pack_e5m2(float lo, float hi) {
  if constexpr (ptx::has(ptx::kFp8Conversion)) return ptx::pack_e5m2(lo, hi);
  return static_cast<unsigned short>(encode_by_bits<2, 15>(lo, 57344.0f) | encode_by_bits<2, 15>(hi, 57344.0f) << 8);
}

}  // namespace attune::common
