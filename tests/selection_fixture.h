// SPDX-License-Identifier: Apache-2.0
// What the tests of the selection share: rows of scores that are easy to get wrong, and what must be chosen of them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cases/number.h"

namespace attune::tests {

// The topk best of the scores from `begin` on, by the rules of docs/semantics.md, ascending and filled up with -1.
inline std::vector<int32_t> expected_choice(const std::vector<float>& scores, size_t begin, size_t topk) {
  std::vector<int32_t> best;
  for (size_t i = begin; i < scores.size(); ++i) best.push_back(static_cast<int32_t>(i));
  const auto better = [&](int32_t a, int32_t b) {
    const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    if (std::isnan(x) != std::isnan(y)) return std::isnan(x);
    return x > y || (!(y > x) && a < b);
  };
  if (topk < best.size()) {
    std::nth_element(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(topk), best.end(), better);
    best.resize(topk);
  }
  std::sort(best.begin(), best.end());
  best.resize(topk, -1);
  return best;
}

// Of the scores of a row.
struct Distribution {
  const char* name;
  float (*score)(size_t i, cases::Random& random);
};
inline constexpr Distribution kDistributions[] = {
    {"normal", [](size_t, cases::Random& r) { return static_cast<float>(r.normal()); }},
    {"far from zero", [](size_t, cases::Random& r) { return 1000 + static_cast<float>(r.normal()); }},
    {"equal", [](size_t, cases::Random&) { return 2.5f; }},
    {"zeros of both signs", [](size_t i, cases::Random&) { return i % 3 == 0 ? -0.0f : 0.0f; }},
    {"few values", [](size_t i, cases::Random&) { return static_cast<float>(i * 7919 % 5) - 2; }},
    {"one bin", [](size_t i, cases::Random&) { return std::bit_cast<float>(0x3f800000u + unsigned(i * 7919 % 4099)); }},
    {"one bin below zero",
     [](size_t i, cases::Random&) { return std::bit_cast<float>(0xbf800000u + unsigned(i * 7919 % 4099)); }},
    {"second digit",
     [](size_t i, cases::Random&) { return std::bit_cast<float>(0x40000000u + unsigned(i % 3000 << 7)); }},
    {"rising", [](size_t i, cases::Random&) { return static_cast<float>(i); }},
    {"falling", [](size_t i, cases::Random&) { return -static_cast<float>(i); }},
    {"many NaN",
     [](size_t i, cases::Random& r) {
       const float nan = std::numeric_limits<float>::quiet_NaN();
       return r.chance(0.4) ? (i % 2 == 0 ? nan : -nan) : static_cast<float>(r.normal());
     }},
    {"infinite",
     [](size_t i, cases::Random& r) {
       const float inf = std::numeric_limits<float>::infinity();
       return r.chance(0.7) ? -inf : i % 4 == 0 ? inf : static_cast<float>(r.normal());
     }},
};

}  // namespace attune::tests
