// SPDX-License-Identifier: Apache-2.0
#include "number.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace attune::cases {
namespace {

// Bits of a floating-point format. finite_only: all-ones exponents are numbers, except the all-ones code, which is NaN
// (e4m3fn).
struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
  bool finite_only;
};

constexpr FloatFormat format_of(attune_dtype dtype) {
  switch (dtype) {
    case ATTUNE_FLOAT32:
      return {8, 23, false};
    case ATTUNE_FLOAT16:
      return {5, 10, false};
    case ATTUNE_BFLOAT16:
      return {8, 7, false};
    case ATTUNE_FLOAT8_E4M3:
      return {4, 3, true};
    case ATTUNE_FLOAT8_E5M2:
      return {5, 2, false};
    default:
      throw std::invalid_argument("not a floating-point dtype");
  }
}

constexpr int bias_of(const FloatFormat& f) { return (1 << (f.exponent_bits - 1)) - 1; }

// By the bits of a double, as random data are made of millions of numbers: 2^exponent, and the exponent of a normal x >
// 0.
double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52); }
int exponent_of(double x) { return static_cast<int>(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff) - 1023; }
// Adding 2^52 leaves no room for a fraction. 0 <= x < 2^51.
double round_to_integer(double x) { return (x + 0x1p52) - 0x1p52; }

uint32_t largest_finite(const FloatFormat& f) {
  const uint32_t all_exponent = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
  const uint32_t mantissa_mask = (1u << f.mantissa_bits) - 1;
  return f.finite_only ? (all_exponent | mantissa_mask) - 1 : all_exponent - 1;
}

uint32_t encode_float(const FloatFormat& f, double value, bool saturate) {
  const uint32_t sign = std::signbit(value) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0;
  const uint32_t all_exponent = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
  const uint32_t mantissa_mask = (1u << f.mantissa_bits) - 1;
  if (std::isnan(value)) return sign | all_exponent | (f.finite_only ? mantissa_mask : 1u << (f.mantissa_bits - 1));
  const double magnitude = std::fabs(value);
  uint32_t bits = 0;
  if (std::isinf(magnitude)) {
    bits = all_exponent + (f.finite_only ? mantissa_mask : 0);
  } else if (magnitude > 0) {
    const int exponent = std::max(exponent_of(magnitude), 1 - bias_of(f));
    if (exponent > bias_of(f) + 1) {
      bits = all_exponent + mantissa_mask;
    } else {
      // In units of the format's spacing, rounding to an integer is rounding to nearest even. A subnormal has the
      // exponent field 0, and adding the steps carries into the exponent by itself.
      const double steps = round_to_integer(magnitude * power_of_two(f.mantissa_bits - exponent));
      bits = (static_cast<uint32_t>(exponent + bias_of(f) - 1) << f.mantissa_bits) + static_cast<uint32_t>(steps);
    }
  }
  const uint32_t largest = largest_finite(f);
  if (bits > largest) bits = saturate || f.finite_only ? largest : all_exponent;
  return sign | bits;
}

double decode_float(const FloatFormat& f, uint32_t bits) {
  const uint32_t mantissa_mask = (1u << f.mantissa_bits) - 1;
  const uint32_t exponent_mask = (1u << f.exponent_bits) - 1;
  const uint32_t mantissa = bits & mantissa_mask;
  const uint32_t exponent = (bits >> f.mantissa_bits) & exponent_mask;
  const double sign = (bits >> (f.exponent_bits + f.mantissa_bits)) & 1 ? -1.0 : 1.0;
  if (exponent == exponent_mask) {
    if (f.finite_only ? mantissa == mantissa_mask : mantissa != 0) return std::numeric_limits<double>::quiet_NaN();
    if (!f.finite_only) return sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * mantissa * power_of_two(1 - bias_of(f) - f.mantissa_bits);
  return sign * (mantissa + mantissa_mask + 1.0) *
         power_of_two(static_cast<int>(exponent) - bias_of(f) - f.mantissa_bits);
}

template <typename T>
void store(void* element, T value) {
  std::memcpy(element, &value, sizeof(T));
}

template <typename T>
T load(const void* element) {
  T value;
  std::memcpy(&value, element, sizeof(T));
  return value;
}

template <typename T>
T clamp_to(double value) {
  if (std::isnan(value)) return 0;
  const double rounded = std::nearbyint(value);
  if (rounded <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (rounded >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(rounded);
}

struct NamedDtype {
  attune_dtype dtype;
  const char* name;
  int64_t size;
};
constexpr NamedDtype kDtypes[] = {
    {ATTUNE_FLOAT32, "f32", 4},      {ATTUNE_FLOAT16, "f16", 2},      {ATTUNE_BFLOAT16, "bf16", 2},
    {ATTUNE_FLOAT8_E4M3, "e4m3", 1}, {ATTUNE_FLOAT8_E5M2, "e5m2", 1}, {ATTUNE_INT8, "i8", 1},
    {ATTUNE_UINT8, "u8", 1},         {ATTUNE_INT32, "i32", 4},        {ATTUNE_INT64, "i64", 8}};

}  // namespace

int64_t element_size(attune_dtype dtype) {
  for (const NamedDtype& d : kDtypes) {
    if (d.dtype == dtype) return d.size;
  }
  return 0;
}

const char* short_name(attune_dtype dtype) {
  for (const NamedDtype& d : kDtypes) {
    if (d.dtype == dtype) return d.name;
  }
  return "none";
}

attune_dtype dtype_from_name(std::string_view name) {
  for (const NamedDtype& d : kDtypes) {
    if (name == d.name) return d.dtype;
  }
  throw std::invalid_argument("unknown dtype \"" + std::string(name) + "\"");
}

bool is_float(attune_dtype dtype) { return dtype >= ATTUNE_FLOAT32 && dtype <= ATTUNE_FLOAT8_E5M2; }

double unit_roundoff(attune_dtype dtype) { return std::ldexp(1.0, -format_of(dtype).mantissa_bits - 1); }

double half_step(attune_dtype dtype, double value) {
  if (!is_float(dtype)) return 0.5;
  const FloatFormat f = format_of(dtype);
  const int exponent = value == 0 ? 1 - bias_of(f) : std::max(std::ilogb(value), 1 - bias_of(f));
  return std::ldexp(1.0, exponent - f.mantissa_bits - 1);
}

void encode(attune_dtype dtype, double value, void* element, bool saturate) {
  switch (dtype) {
    case ATTUNE_FLOAT32:
      if (!saturate) {
        store(element, static_cast<float>(value));
      } else {
        store(element, encode_float(format_of(dtype), value, true));
      }
      return;
    case ATTUNE_FLOAT16:
    case ATTUNE_BFLOAT16:
      store(element, static_cast<uint16_t>(encode_float(format_of(dtype), value, saturate)));
      return;
    case ATTUNE_FLOAT8_E4M3:
    case ATTUNE_FLOAT8_E5M2:
      store(element, static_cast<uint8_t>(encode_float(format_of(dtype), value, saturate)));
      return;
    case ATTUNE_INT8:
      store(element, clamp_to<int8_t>(value));
      return;
    case ATTUNE_UINT8:
      store(element, clamp_to<uint8_t>(value));
      return;
    case ATTUNE_INT32:
      store(element, clamp_to<int32_t>(value));
      return;
    case ATTUNE_INT64:
      store(element, clamp_to<int64_t>(value));
      return;
    default:
      throw std::invalid_argument("cannot encode this dtype");
  }
}

double decode(attune_dtype dtype, const void* element) {
  switch (dtype) {
    case ATTUNE_FLOAT32:
      return load<float>(element);
    case ATTUNE_FLOAT16:
    case ATTUNE_BFLOAT16:
      return decode_float(format_of(dtype), load<uint16_t>(element));
    case ATTUNE_FLOAT8_E4M3:
    case ATTUNE_FLOAT8_E5M2:
      return decode_float(format_of(dtype), load<uint8_t>(element));
    case ATTUNE_INT8:
      return load<int8_t>(element);
    case ATTUNE_UINT8:
      return load<uint8_t>(element);
    case ATTUNE_INT32:
      return load<int32_t>(element);
    case ATTUNE_INT64:
      return static_cast<double>(load<int64_t>(element));
    default:
      throw std::invalid_argument("cannot decode this dtype");
  }
}

double round_to(attune_dtype dtype, double value, bool saturate) {
  uint64_t element = 0;
  encode(dtype, value, &element, saturate);
  return decode(dtype, &element);
}

void poison(attune_dtype dtype, void* elements, int64_t n) {
  // All-ones is a NaN in every float format; for int8 the largest code is the loudest there is.
  std::memset(elements, dtype == ATTUNE_INT8 ? 0x7f : 0xff, static_cast<size_t>(n * element_size(dtype)));
}

Random::Random(std::string_view text, uint64_t salt) : state_(0xcbf29ce484222325ull ^ salt) {
  for (const char c : text) state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
}

uint64_t Random::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

int64_t Random::integer(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
}

double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

double Random::normal() {
  const uint64_t bits = next();
  int64_t sum = 0;
  for (int part = 0; part < 4; ++part) sum += static_cast<int64_t>((bits >> (16 * part)) & 0xffff);
  // Four uniforms on 0..65535: mean 2 * 65535, variance 4 * 65536^2 / 12.
  return static_cast<double>(sum - 2 * 65535) / 37837.0;
}

}  // namespace attune::cases
