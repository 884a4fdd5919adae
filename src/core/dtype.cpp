// SPDX-License-Identifier: Apache-2.0
#include "core/dtype.h"

#include <cstring>
#include <iterator>

namespace attune {
namespace {

// By attune_dtype.
constexpr struct {
  int64_t size;
  const char* name;
} kDtypes[] = {{0, "none"}, {4, "float32"}, {2, "float16"}, {2, "bfloat16"}, {1, "e4m3"},
               {1, "e5m2"}, {1, "int8"},    {1, "uint8"},   {4, "int32"},    {8, "int64"}};
static_assert(std::size(kDtypes) == ATTUNE_INT64 + 1, "a dtype is missing");

bool is_known(int32_t dtype) { return dtype >= 0 && dtype <= ATTUNE_INT64; }

// At any address.
template <class T>
T load(const void* element) {
  T x;
  std::memcpy(&x, element, sizeof x);
  return x;
}
template <class T>
void store(T x, void* element) {
  std::memcpy(element, &x, sizeof x);
}

// Rounds |x| to a format with kMan stored mantissa bits, exponent bias kBias and largest finite code kMax, saturating.
template <int kMan, int kBias, uint8_t kMax>
uint8_t round_to_float8(float x, uint8_t nan_code) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint8_t>(sign | nan_code);
  const float ax = std::bit_cast<float>(a);
  constexpr float kMinNormal = 1.0f / (1 << (kBias - 1));
  if (ax < kMinNormal) {
    // Subnormal: a multiple of 2^(1 - bias - man). Adding 2^23 units rounds to nearest even, with the right carry.
    const float unit = kMinNormal / (1 << kMan);
    return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(ax / unit)));
  }
  constexpr int kShift = 23 - kMan;
  const uint32_t rounded = a + ((1u << (kShift - 1)) - 1u) + ((a >> kShift) & 1u);
  const uint32_t code = (rounded >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMan);
  return static_cast<uint8_t>(sign | (code > kMax ? kMax : code));
}

}  // namespace

int64_t dtype_size(int32_t dtype) { return is_known(dtype) ? kDtypes[dtype].size : 0; }

const char* dtype_name(int32_t dtype) { return is_known(dtype) ? kDtypes[dtype].name : "unknown dtype"; }

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 0) {
    const float x = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -x : x;
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t float_to_half(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more: infinity
  if (a < 0x38800000u) {                                               // below 2^-14: subnormal, unit 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(std::bit_cast<float>(a) * 0x1p24f)));
  }
  const uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

float e4m3_to_float(uint8_t x) {
  const float sign = (x & 0x80) != 0 ? -1.0f : 1.0f;
  const int exponent = (x >> 3) & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

float e5m2_to_float(uint8_t x) { return half_to_float(static_cast<uint16_t>(x << 8)); }

uint8_t float_to_e4m3(float x) { return round_to_float8<3, 7, 0x7e>(x, 0x7f); }
uint8_t float_to_e5m2(float x) { return round_to_float8<2, 15, 0x7b>(x, 0x7f); }

int8_t float_to_int8(float x) {
  if (std::isnan(x)) return 0;
  const float r = std::nearbyint(x);
  return static_cast<int8_t>(r < -127.0f ? -127.0f : (r > 127.0f ? 127.0f : r));
}

float load_as_float(int32_t dtype, const void* element) {
  switch (dtype) {
    case ATTUNE_FLOAT32:
      return load<float>(element);
    case ATTUNE_FLOAT16:
      return half_to_float(load<uint16_t>(element));
    case ATTUNE_BFLOAT16:
      return bf16_to_float(load<uint16_t>(element));
    case ATTUNE_FLOAT8_E4M3:
      return e4m3_to_float(load<uint8_t>(element));
    case ATTUNE_FLOAT8_E5M2:
      return e5m2_to_float(load<uint8_t>(element));
    case ATTUNE_INT8:
      return load<int8_t>(element);
    default:
      return std::numeric_limits<float>::quiet_NaN();
  }
}

void store_from_float(int32_t dtype, float x, void* element) {
  switch (dtype) {
    case ATTUNE_FLOAT32:
      return store(x, element);
    case ATTUNE_FLOAT16:
      return store(float_to_half(x), element);
    case ATTUNE_BFLOAT16:
      return store(float_to_bf16(x), element);
    case ATTUNE_FLOAT8_E4M3:
      return store(float_to_e4m3(x), element);
    case ATTUNE_FLOAT8_E5M2:
      return store(float_to_e5m2(x), element);
    case ATTUNE_INT8:
      return store(float_to_int8(x), element);
    default:
      break;
  }
}

}  // namespace attune
