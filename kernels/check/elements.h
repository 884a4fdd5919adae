// SPDX-License-Identifier: Apache-2.0
// Stored elements as doubles, which hold all of them exactly; and reads of single elements of tensors (Tensor or
// attune_tensor). For host and device (check/host_device.h).
#pragma once

#include "check/host_device.h"
#include "check/oracle_params.h"

namespace attune::oracle {

ATTUNE_CHECK_BOTH double from_bits(unsigned long long bits) {
  union {
    unsigned long long bits;
    double value;
  } both;
  both.bits = bits;
  return both.value;
}
ATTUNE_CHECK_BOTH double infinity() { return from_bits(0x7ffull << 52); }
ATTUNE_CHECK_BOTH double not_a_number() { return from_bits(0xfffull << 51); }
ATTUNE_CHECK_BOTH bool is_nan(double x) { return x != x; }
// 2^e, for an e of normal numbers.
ATTUNE_CHECK_BOTH double power_of_two(int e) { return from_bits(static_cast<unsigned long long>(e + 1023) << 52); }

// Decodes sign | exponent | mantissa, with subnormals. In IEEE formats the all-ones exponent is infinity or NaN.
ATTUNE_CHECK_BOTH double decode_float(unsigned bits, int exponent_bits, int mantissa_bits, bool ieee) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = static_cast<int>(bits & ((1u << mantissa_bits) - 1));
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = ((bits >> (mantissa_bits + exponent_bits)) & 1u) != 0 ? -1.0 : 1.0;
  if (ieee && exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? not_a_number() : sign * infinity();
  if (exponent == 0) return sign * mantissa * power_of_two(1 - bias - mantissa_bits);
  return sign * (mantissa + (1 << mantissa_bits)) * power_of_two(exponent - bias - mantissa_bits);
}

ATTUNE_CHECK_BOTH double decode_bf16(unsigned bits) {
  union {
    unsigned bits;
    float value;
  } both;
  both.bits = bits << 16;
  return both.value;
}
// e4m3fn has no infinity: the largest exponent has ordinary numbers, and only the all-ones code is NaN.
ATTUNE_CHECK_BOTH double decode_e4m3(unsigned code) {
  return (code & 0x7f) == 0x7f ? not_a_number() : decode_float(code, 4, 3, false);
}
// A power of two, as a biased exponent; 255 is NaN.
ATTUNE_CHECK_BOTH double decode_e8m0(unsigned code) {
  return code == 255 ? not_a_number() : power_of_two(static_cast<int>(code) - 127);
}

template <class T>
ATTUNE_CHECK_BOTH T load(const char* at) {
  return *reinterpret_cast<const T*>(at);
}

ATTUNE_CHECK_BOTH double decode(int dtype, const char* at) {
  switch (dtype) {
    case kFloat64:
      return load<double>(at);
    case kFloat32:
      return load<float>(at);
    case kFloat16:
      return decode_float(load<unsigned short>(at), 5, 10, true);
    case kBfloat16:
      return decode_bf16(load<unsigned short>(at));
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
    case kInt64:
      return static_cast<double>(load<long long>(at));
    default:
      return not_a_number();
  }
}

ATTUNE_CHECK_BOTH int element_bytes(int dtype) {
  if (dtype == kFloat64 || dtype == kInt64) return 8;
  if (dtype == kFloat32 || dtype == kInt32) return 4;
  return dtype == kFloat16 || dtype == kBfloat16 ? 2 : 1;
}

ATTUNE_CHECK_BOTH bool present(const auto& t) {
  return t.dtype != kNone;
}
// Trailing axes without an index take element 0.
ATTUNE_CHECK_BOTH const char* element_at(const auto& t, auto... index) {
  const long long indices[] = {index...};
  long long offset = 0;
  for (int axis = 0; axis < static_cast<int>(sizeof...(index)); ++axis) offset += indices[axis] * t.stride[axis];
  return static_cast<const char*>(t.data) + offset * element_bytes(t.dtype);
}
ATTUNE_CHECK_BOTH double number_at(const auto& t, auto... index) {
  return decode(t.dtype, element_at(t, index...));
}
ATTUNE_CHECK_BOTH long long integer_at(const auto& t, auto... index) {
  const char* at = element_at(t, index...);
  if (t.dtype == kInt64) return load<long long>(at);  // not through double, which holds 53 bits
  return t.dtype == kInt32 ? load<int>(at) : load<unsigned char>(at);
}

ATTUNE_CHECK_BOTH long long clamp(long long x, long long low, long long high) {
  return x < low ? low : x > high ? high : x;
}

}  // namespace attune::oracle
