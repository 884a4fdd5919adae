// SPDX-License-Identifier: Apache-2.0
// Stored elements as doubles. Every format here is a subset of float64, so decoding is exact.
#include <bit>
#include <cstring>
#include <limits>

#include "reference/reference.h"

namespace attune::reference {
namespace {

template <typename T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// By the bits of a double: std::ldexp took a sixth of a test's time.
double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52); }

// sign | exponent | mantissa, with subnormals. The all-ones exponent is infinity or NaN in IEEE formats.
double decode_float(uint32_t bits, int exponent_bits, int mantissa_bits, bool ieee) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = (bits >> (mantissa_bits + exponent_bits)) & 1u ? -1.0 : 1.0;
  if (ieee && exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  const double fraction = mantissa * power_of_two(-mantissa_bits);
  if (exponent == 0) return sign * fraction * power_of_two(1 - bias);
  return sign * (1.0 + fraction) * power_of_two(exponent - bias);
}

double decode_e4m3(uint8_t code) {
  // e4m3fn has no infinity: the largest exponent is in use, and only the all-ones code is NaN.
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  return decode_float(code, 4, 3, false);
}

}  // namespace

double decode_element(attune_dtype dtype, const void* element) {
  switch (dtype) {
    case ATTUNE_FLOAT32:
      return load<float>(element);
    case ATTUNE_FLOAT16:
      return decode_float(load<uint16_t>(element), 5, 10, true);
    case ATTUNE_BFLOAT16:
      return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(element)) << 16);
    case ATTUNE_FLOAT8_E4M3:
      return decode_e4m3(load<uint8_t>(element));
    case ATTUNE_FLOAT8_E5M2:
      return decode_float(load<uint8_t>(element), 5, 2, true);
    case ATTUNE_INT8:
      return load<int8_t>(element);
    case ATTUNE_UINT8:
      return load<uint8_t>(element);
    case ATTUNE_INT32:
      return load<int32_t>(element);
    case ATTUNE_INT64:
      return static_cast<double>(load<int64_t>(element));
    case ATTUNE_DTYPE_NONE:
      break;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace attune::reference
