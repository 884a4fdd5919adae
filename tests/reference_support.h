// SPDX-License-Identifier: Apache-2.0
// What the tests of the oracle share: tensors over owned values, and descriptors with defaults.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "reference/reference.h"

namespace attune::reference_tests {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <typename T>
constexpr attune_dtype dtype_of() {
  if constexpr (std::is_same_v<T, float>) return ATTUNE_FLOAT32;
  if constexpr (std::is_same_v<T, int32_t>) return ATTUNE_INT32;
  if constexpr (std::is_same_v<T, int8_t>) return ATTUNE_INT8;
  if constexpr (std::is_same_v<T, uint8_t>) return ATTUNE_UINT8;
  return ATTUNE_DTYPE_NONE;
}

// Owns the values of tensors.
class Store {
 public:
  template <typename T>
  attune_tensor add(const std::vector<int64_t>& shape, const std::vector<T>& values,
                    attune_dtype dtype = dtype_of<T>()) {
    auto data = std::make_shared<std::vector<T>>(values);
    int64_t size = 1;
    attune_tensor t{};
    t.data = data->data();
    t.dtype = dtype;
    t.rank = static_cast<int32_t>(shape.size());
    for (int i = t.rank - 1; i >= 0; --i) {
      t.shape[i] = shape[static_cast<size_t>(i)];
      t.stride[i] = size;
      size *= t.shape[i];
    }
    EXPECT_EQ(size, static_cast<int64_t>(values.size())) << "the test's tensor does not have its shape";
    owned_.push_back(std::move(data));
    return t;
  }
  attune_tensor floats(const std::vector<int64_t>& shape, const std::vector<float>& values) {
    return add(shape, values);
  }
  attune_tensor ints(const std::vector<int32_t>& values) { return add({static_cast<int64_t>(values.size())}, values); }
  attune_tensor table(int64_t rows, const std::vector<int32_t>& values) {
    return add({rows, static_cast<int64_t>(values.size()) / rows}, values);
  }
  attune_tensor filled(const std::vector<int64_t>& shape, float value) {
    return floats(shape, std::vector<float>(size_of(shape), value));
  }
  // 0.37, -0.91, ...: irregular numbers in [-1, 1].
  attune_tensor varied(const std::vector<int64_t>& shape, int seed) {
    std::vector<float> values(size_of(shape));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(std::sin(1.7 * static_cast<double>(i) + 0.9 * seed * seed + seed));
    return floats(shape, values);
  }

 private:
  static size_t size_of(const std::vector<int64_t>& shape) {
    size_t size = 1;
    for (const int64_t n : shape) size *= static_cast<size_t>(n);
    return size;
  }
  std::vector<std::shared_ptr<void>> owned_;
};

inline attune_attention empty_attention() {
  attune_attention a{};
  a.struct_size = sizeof(a);
  a.window_left = a.window_right = -1;
  a.softmax_scale = 1;
  return a;
}

// Queries of zeros: P is the same for every visible key, so one output channel holds the mean of what is seen. With the
// values 1, 10, 100, ... of keys 0, 1, 2, ... the digits of mean * count name the keys.
inline int64_t seen_digits(const reference::RowResult& row) {
  return std::llround(row.out[0] * static_cast<double>(row.num_visible));
}
// Those of every row.
inline std::vector<int64_t> seen(const attune_attention& a) {
  std::vector<int64_t> digits;
  for (const reference::RowResult& row : reference::attention(a)) digits.push_back(seen_digits(row));
  return digits;
}

// `count` powers of ten from 10^0.
inline std::vector<float> powers_of_ten(int64_t count) {
  std::vector<float> values;
  float power = 1;
  for (int64_t i = 0; i < count; ++i, power *= 10) values.push_back(power);
  return values;
}

inline void expect_same_rows(const std::vector<reference::RowResult>& a, const std::vector<reference::RowResult>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].written, b[i].written) << i;
    EXPECT_EQ(a[i].out, b[i].out) << i;
    EXPECT_EQ(a[i].lse, b[i].lse) << i;
    EXPECT_EQ(a[i].max_logit, b[i].max_logit) << i;
    EXPECT_EQ(a[i].num_visible, b[i].num_visible) << i;
  }
}

}  // namespace attune::reference_tests
