// SPDX-License-Identifier: Apache-2.0
// Numbers as they are stored: encoding, decoding and random data for the tests. Independent of the library and of the
// oracle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attune/attune.h"

namespace attune::cases {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of one element. 0 for NONE.
int64_t element_size(attune_dtype dtype);
// "f32", "f16", "bf16", "e4m3", "e5m2", "i8", "u8", "i32", "i64" and back. An unknown name throws
// std::invalid_argument.
const char* short_name(attune_dtype dtype);
attune_dtype dtype_from_name(std::string_view name);

// True for the five floating-point types.
bool is_float(attune_dtype dtype);
// Half a unit in the last place of 1: 2^-24, 2^-11, 2^-8, 2^-4, 2^-3.
double unit_roundoff(attune_dtype dtype);

// Half the distance of the numbers of a format around `value`: the largest error of rounding to it.
double half_step(attune_dtype dtype, double value);

// Rounds to nearest even and stores. Beyond the range: infinity for fp32, fp16, bf16 and e5m2 unless saturate is set;
// the largest finite value for e4m3; clamped for integers (NaN: 0).
void encode(attune_dtype dtype, double value, void* element, bool saturate = false);
double decode(attune_dtype dtype, const void* element);
// decode(encode(value)).
double round_to(attune_dtype dtype, double value, bool saturate = false);
// Fills n elements with what no reader may use: NaN, or the largest code of int8.
void poison(attune_dtype dtype, void* elements, int64_t n);

// A small fast generator (splitmix64). Same seed, same numbers, on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  Random(std::string_view text, uint64_t salt);
  uint64_t next();
  // Uniform in [low, high].
  int64_t integer(int64_t low, int64_t high);
  // Uniform in [0, 1).
  double uniform();
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  // Mean 0, variance 1, near normal (four uniforms), within +-3.5.
  double normal();
  bool chance(double probability) { return uniform() < probability; }
  template <typename T>
  const T& pick(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(integer(0, static_cast<int64_t>(choices.size()) - 1))];
  }
  template <typename T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i)
      std::swap(items[i - 1], items[static_cast<size_t>(integer(0, static_cast<int64_t>(i) - 1))]);
  }

 private:
  uint64_t state_;
};

}  // namespace attune::cases
