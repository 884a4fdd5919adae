// SPDX-License-Identifier: Apache-2.0
// Small tensors over vectors, for unit tests of the library's internals.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "attune/attune.h"
#include "failure.h"

namespace attune::unit {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

template <class T>
attune_tensor dense(std::vector<T>& data, attune_dtype dtype, std::vector<int64_t> shape) {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  if (n > static_cast<int64_t>(data.size())) throw std::logic_error("the vector is smaller than the tensor");
  return attune_dense_tensor(data.data(), dtype, static_cast<int32_t>(shape.size()), shape.data());
}

inline attune_tensor dense(std::vector<float>& data, std::vector<int64_t> shape) {
  return dense(data, ATTUNE_FLOAT32, std::move(shape));
}
inline attune_tensor dense(std::vector<int32_t>& data, std::vector<int64_t> shape) {
  return dense(data, ATTUNE_INT32, std::move(shape));
}
inline attune_tensor dense(std::vector<int64_t>& data, std::vector<int64_t> shape) {
  return dense(data, ATTUNE_INT64, std::move(shape));
}

inline std::vector<float> normal(size_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0.0f, scale);
  std::vector<float> x(n);
  for (float& v : x) v = distribution(random);
  return x;
}

// NaN where NaN is expected, else within tolerance; a NaN on one side only fails.
inline testing::AssertionResult is_close(double actual, double expected, double tolerance) {
  const bool close =
      std::isnan(expected) ? std::isnan(actual) : actual == expected || std::fabs(actual - expected) <= tolerance;
  if (close) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "it is " << actual << ", expected " << expected << " within " << tolerance;
}

#define EXPECT_CLOSE(actual, expected, tolerance)                                                  \
  EXPECT_TRUE(::attune::unit::is_close(static_cast<double>(actual), static_cast<double>(expected), \
                                       static_cast<double>(tolerance)))

}  // namespace attune::unit
