// SPDX-License-Identifier: Apache-2.0
// Whether one stored element is within the bound that an oracle allows.
#pragma once

#include "check/compare_params.h"
#include "check/elements.h"

namespace attune::oracle {

// Rounds to the nearest number of a format, ties to even; beyond its range to infinity or to the largest number.
__device__ inline double round_to(int dtype, double x, bool saturate) {
  if (is_nan(x)) return x;
  const int exponent_bits = dtype == kFloat16 || dtype == kE5m2 ? 5 : dtype == kE4m3 ? 4 : 8;
  const int mantissa_bits =
      dtype == kFloat32 ? 23 : dtype == kFloat16 ? 10 : dtype == kBfloat16 ? 7 : dtype == kE4m3 ? 3 : 2;
  const int largest_exponent = (1 << (exponent_bits - 1)) - 1 + (dtype == kE4m3 ? 1 : 0);
  const int least_exponent = 2 - (1 << (exponent_bits - 1));  // of normal numbers
  // e4m3's code of all ones is NaN.
  const double last = dtype == kE4m3 ? 448.0 : (2 - power_of_two(-mantissa_bits)) * power_of_two(largest_exponent);
  const double beyond = saturate || dtype == kE4m3 ? last : infinity(), magnitude = fabs(x);
  double rounded = magnitude;
  if (magnitude >= 2 * power_of_two(largest_exponent)) {
    rounded = beyond;
  } else {
    int exponent = least_exponent;
    while (exponent < largest_exponent && magnitude >= power_of_two(exponent + 1)) ++exponent;
    const double step = power_of_two(exponent - mantissa_bits);
    rounded = rint(magnitude / step) * step;
    if (rounded > last) rounded = beyond;
  }
  return x < 0 ? -rounded : rounded;
}

__device__ inline bool is_within(int dtype, double expected, double bound, double actual, bool saturate) {
  if (is_nan(expected)) return is_nan(actual);
  if (!is_finite(expected)) return actual == round_to(dtype, expected, saturate);
  return round_to(dtype, expected - bound, saturate) <= actual && actual <= round_to(dtype, expected + bound, saturate);
}

__device__ inline bool is_untouched(int filler, int dtype, const char* at) {
  for (int i = 0; i < element_bytes(dtype); ++i) {
    if (load<unsigned char>(at + i) != filler) return false;
  }
  return true;
}

// Counts element number `index` of those compared.
__device__ inline void count_element(bool good, long long index, double expected, double actual, double bound,
                                     Verdict& verdict) {
  ++verdict.num_elements;
  if (good) return;
  if (verdict.num_bad++ == 0) verdict = {verdict.num_elements, 1, index, expected, actual, bound};
}

}  // namespace attune::oracle
