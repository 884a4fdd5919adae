// SPDX-License-Identifier: Apache-2.0
// Arithmetic of sizes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace attune {

// For non-negative numbers: x / by, rounded up; x, rounded up to a multiple of `to`.
constexpr int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }
constexpr int64_t round_up(int64_t x, int64_t to) { return ceil_div(x, to) * to; }

// Clamps to the range of int.
constexpr int to_int(int64_t x) {
  return static_cast<int>(std::clamp<int64_t>(x, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
}

}  // namespace attune
