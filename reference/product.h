// SPDX-License-Identifier: Apache-2.0
// Products of rows, in which most of a test's time goes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace attune::reference {

// A sum of products, and the sum of their magnitudes.
struct Product {
  double sum = 0, abs = 0;
};

// x and y have the same length. Eight sums side by side, as one would wait for itself: four vectors of two numbers,
// which every machine has.
inline Product product(const std::vector<double>& x, const std::vector<double>& y) {
  using Pair = double __attribute__((vector_size(16)));
  using Bits = int64_t __attribute__((vector_size(16)));
  constexpr size_t kPairs = 4, kSums = 2 * kPairs;
  Pair sums[kPairs] = {}, magnitudes[kPairs] = {};
  const auto add = [&](const double* a, const double* b) {
    for (size_t i = 0; i < kPairs; ++i) {
      Pair u, v;
      std::memcpy(&u, a + 2 * i, sizeof u);
      std::memcpy(&v, b + 2 * i, sizeof v);
      const Pair term = u * v;
      sums[i] += term;
      magnitudes[i] += reinterpret_cast<Pair>(reinterpret_cast<Bits>(term) & std::numeric_limits<int64_t>::max());
    }
  };
  const size_t whole = x.size() / kSums * kSums;
  for (size_t i = 0; i < whole; i += kSums) add(x.data() + i, y.data() + i);
  double last_x[kSums] = {}, last_y[kSums] = {};
  std::copy(x.begin() + static_cast<ptrdiff_t>(whole), x.end(), last_x);
  std::copy(y.begin() + static_cast<ptrdiff_t>(whole), y.end(), last_y);
  add(last_x, last_y);
  Product all;
  for (size_t i = 0; i < kSums; ++i) all.sum += sums[i / 2][i % 2], all.abs += magnitudes[i / 2][i % 2];
  return all;
}

}  // namespace attune::reference
