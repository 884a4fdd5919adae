// SPDX-License-Identifier: Apache-2.0
// Numbers of the tests (tests/cases/number.h) and of the oracle (reference/element.cpp) against the formats'
// definitions.
#include "cases/number.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/reference.h"

namespace attune::cases {
namespace {

struct Format {
  attune_dtype dtype;
  int exponent_bits, mantissa_bits;
  bool has_infinity;
};
constexpr Format kFormats[] = {{ATTUNE_FLOAT16, 5, 10, true},
                               {ATTUNE_BFLOAT16, 8, 7, true},
                               {ATTUNE_FLOAT8_E5M2, 5, 2, true},
                               {ATTUNE_FLOAT8_E4M3, 4, 3, false}};

int bits_of(const Format& f) { return 1 + f.exponent_bits + f.mantissa_bits; }

double value_of(const Format& f, int code) {
  const int mantissa = code % (1 << f.mantissa_bits), bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = code >> f.mantissa_bits & ((1 << f.exponent_bits) - 1);
  const double sign = code >> (bits_of(f) - 1) != 0 ? -1 : 1;
  if (exponent == (1 << f.exponent_bits) - 1) {
    if (f.has_infinity) return mantissa != 0 ? NAN : sign * INFINITY;
    if (mantissa == (1 << f.mantissa_bits) - 1) return NAN;
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

bool same(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

TEST(Numbers, EveryCodeHasTheValueOfItsFormat) {
  for (const Format& f : kFormats) {
    for (int code = 0; code < 1 << bits_of(f); ++code) {
      const double expected = value_of(f, code);
      for (const double actual : {decode(f.dtype, &code), reference::decode_element(f.dtype, &code)}) {
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(actual)) << short_name(f.dtype) << " code " << code;
        } else {
          EXPECT_TRUE(same(expected, actual)) << short_name(f.dtype) << " code " << code << " is " << actual;
        }
      }
    }
  }
}

int code_of(const Format& f, double value) {
  int code = 0;
  encode(f.dtype, value, &code);
  return code;
}

// Between two neighbours the nearer is taken, and in the middle the even one.
TEST(Numbers, EncodingRoundsToTheNearestAndToEven) {
  for (const Format& f : kFormats) {
    const int sign = 1 << (bits_of(f) - 1);
    for (int code = 0; code + 1 < sign && std::isfinite(value_of(f, code + 1)); ++code) {
      const double low = value_of(f, code), high = value_of(f, code + 1), middle = (low + high) / 2;
      const int even = code % 2 == 0 ? code : code + 1;
      for (const int s : {0, sign}) {
        const double factor = s != 0 ? -1 : 1;
        EXPECT_EQ(code_of(f, factor * low), code + s) << short_name(f.dtype);
        EXPECT_EQ(code_of(f, factor * std::nextafter(middle, 0)), code + s) << short_name(f.dtype) << " " << middle;
        EXPECT_EQ(code_of(f, factor * middle), even + s) << short_name(f.dtype) << " " << middle;
        EXPECT_EQ(code_of(f, factor * std::nextafter(middle, high)), code + 1 + s)
            << short_name(f.dtype) << " " << middle;
      }
    }
    EXPECT_EQ(code_of(f, std::numeric_limits<double>::denorm_min()), 0) << short_name(f.dtype);
  }
}

TEST(Numbers, BeyondTheRangeLiesInfinityOrTheLargest) {
  for (const Format& f : kFormats) {
    const double largest = round_to(f.dtype, 1e300, true);
    EXPECT_TRUE(std::isfinite(largest));
    EXPECT_EQ(round_to(f.dtype, largest), largest);
    EXPECT_EQ(round_to(f.dtype, -1e300), f.has_infinity ? -INFINITY : -largest) << short_name(f.dtype);
    EXPECT_EQ(round_to(f.dtype, INFINITY, true), largest) << short_name(f.dtype);
    EXPECT_TRUE(std::isnan(round_to(f.dtype, NAN))) << short_name(f.dtype);
  }
}

}  // namespace
}  // namespace attune::cases
