// SPDX-License-Identifier: Apache-2.0
// Stored elements as doubles, which hold all of them exactly; and tensors read one element at a time.
#pragma once

#include "check/oracle_params.h"

namespace attune::oracle {

__device__ inline double from_bits(unsigned long long bits) {
  union {
    unsigned long long bits;
    double value;
  } both;
  both.bits = bits;
  return both.value;
}
__device__ inline double infinity() { return from_bits(0x7ffull << 52); }
__device__ inline double not_a_number() { return from_bits(0xfffull << 51); }
__device__ inline bool is_nan(double x) { return x != x; }
// 2^e of a normal number.
__device__ inline double power_of_two(int e) { return from_bits(static_cast<unsigned long long>(e + 1023) << 52); }

// sign | exponent | mantissa, with subnormals. The all-ones exponent is infinity or NaN in IEEE formats.
__device__ inline double decode_float(unsigned bits, int exponent_bits, int mantissa_bits, bool ieee) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = static_cast<int>(bits & ((1u << mantissa_bits) - 1));
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = ((bits >> (mantissa_bits + exponent_bits)) & 1u) != 0 ? -1.0 : 1.0;
  if (ieee && exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? not_a_number() : sign * infinity();
  if (exponent == 0) return sign * mantissa * power_of_two(1 - bias - mantissa_bits);
  return sign * (mantissa + (1 << mantissa_bits)) * power_of_two(exponent - bias - mantissa_bits);
}

// e4m3fn has no infinity: the largest exponent is in use, and only the all-ones code is NaN.
__device__ inline double decode_e4m3(unsigned code) {
  return (code & 0x7f) == 0x7f ? not_a_number() : decode_float(code, 4, 3, false);
}
// A power of two with a biased exponent; 255 is NaN.
__device__ inline double decode_e8m0(unsigned code) {
  return code == 255 ? not_a_number() : power_of_two(static_cast<int>(code) - 127);
}

template <class T>
__device__ inline T load(const char* at) {
  return *reinterpret_cast<const T*>(at);
}

__device__ inline double decode(int dtype, const char* at) {
  switch (dtype) {
    case kFloat64:
      return load<double>(at);
    case kFloat32:
      return load<float>(at);
    case kFloat16:
      return decode_float(load<unsigned short>(at), 5, 10, true);
    case kBfloat16:
      return decode_float(load<unsigned short>(at), 8, 7, true);
    case kE4m3:
      return decode_e4m3(load<unsigned char>(at));
    case kE5m2:
      return decode_float(load<unsigned char>(at), 5, 2, true);
    case kInt8:
      return load<signed char>(at);
    case kUint8:
      return load<unsigned char>(at);
    case kInt32:
      return load<int>(at);
    default:
      return not_a_number();
  }
}

__device__ inline int element_bytes(int dtype) {
  if (dtype == kFloat64 || dtype == kInt64) return 8;
  if (dtype == kFloat32 || dtype == kInt32) return 4;
  return dtype == kFloat16 || dtype == kBfloat16 ? 2 : 1;
}

__device__ inline bool present(const Tensor& t) { return t.dtype != kNone; }
__device__ inline const char* element_at(const Tensor& t, long long a, long long b = 0, long long c = 0,
                                         long long d = 0) {
  long long offset = a * t.stride[0];
  if (t.rank > 1) offset += b * t.stride[1];
  if (t.rank > 2) offset += c * t.stride[2];
  if (t.rank > 3) offset += d * t.stride[3];
  return t.data + offset * element_bytes(t.dtype);
}
__device__ inline double number_at(const Tensor& t, long long a, long long b = 0, long long c = 0) {
  return decode(t.dtype, element_at(t, a, b, c));
}
__device__ inline long long integer_at(const Tensor& t, long long a, long long b = 0, long long c = 0) {
  const char* at = element_at(t, a, b, c);
  if (t.dtype == kInt64) return load<long long>(at);
  return t.dtype == kInt32 ? load<int>(at) : load<unsigned char>(at);
}

__device__ inline long long clamp(long long x, long long low, long long high) {
  return x < low ? low : x > high ? high : x;
}

__device__ inline double byte_pair_bf16(const char* at) {
  const unsigned low = load<unsigned char>(at), high = load<unsigned char>(at + 1);
  return decode_float(low | high << 8, 8, 7, true);
}
// Rows of bytes are aligned to nothing.
__device__ inline double bytes_fp32(const char* at) {
  unsigned bits = 0;
  for (int i = 3; i >= 0; --i) bits = bits << 8 | load<unsigned char>(at + i);
  return decode_float(bits, 8, 23, true);
}

__device__ inline double channel(const Row& row, int d) {
  switch (row.format) {
    case kMla656:  // 512 e4m3 | 4 fp32 scales, one per 128 | 64 bf16
      if (d >= 512) return byte_pair_bf16(row.first + 528 + 2 * (d - 512));
      return decode_e4m3(load<unsigned char>(row.first + d)) * bytes_fp32(row.first + 512 + 4 * (d / 128));
    case kMla584:  // 448 e4m3 | 64 bf16; 7 e8m0 scales, one per 64, are elsewhere
      if (d >= 448) return byte_pair_bf16(row.first + 448 + 2 * (d - 448));
      return decode_e4m3(load<unsigned char>(row.first + d)) * decode_e8m0(load<unsigned char>(row.scales + d / 64));
    default: {
      const char* at = row.pack > 0 ? row.first + d / row.pack * row.pack_step + d % row.pack * row.step
                                    : row.first + d * row.step;
      return decode(row.dtype, at) * row.scale;
    }
  }
}

// Of q, k or v: [rows, heads, dim], or [batch, seqlen, heads, dim] with rows = batch * seqlen.
__device__ inline Row dense_row(const Tensor& t, long long row, long long head) {
  const char* first = t.rank == 4 ? element_at(t, row / t.shape[1], row % t.shape[1], head) : element_at(t, row, head);
  return {first, t.stride[t.rank - 1] * element_bytes(t.dtype), t.dtype, 1.0, 0, 0, kPlain, nullptr};
}

}  // namespace attune::oracle
