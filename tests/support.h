// SPDX-License-Identifier: Apache-2.0
// What the tests share: a plan as a value, and reading results in the order of their indices.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cases/compare.h"
#include "cases/row.h"

namespace attune::tests {

inline constexpr attune_device kCpu = {ATTUNE_DEVICE_CPU, 0};

#define ASSERT_ATTUNE_OK(call)                                                                                         \
  do {                                                                                                                 \
    const attune_status attune_test_status = (call);                                                                   \
    ASSERT_EQ(attune_test_status, ATTUNE_OK) << attune_status_name(attune_test_status) << ": " << attune_last_error(); \
  } while (false)
#define EXPECT_ATTUNE_OK(call)                                                                                         \
  do {                                                                                                                 \
    const attune_status attune_test_status = (call);                                                                   \
    EXPECT_EQ(attune_test_status, ATTUNE_OK) << attune_status_name(attune_test_status) << ": " << attune_last_error(); \
  } while (false)

// Parses one JSON row into its one case.
inline cases::Case make_case(const std::string& row) {
  std::vector<cases::Case> parsed = cases::parse_cases(R"({"area": "test", "cases": [)" + row + "]}");
  EXPECT_EQ(parsed.size(), 1u);
  return parsed.front();
}
inline cases::Case make_case(const cases::Row& row) { return make_case(row.text()); }

// One of cases::every_tensor_cases(), by its name in that table.
inline const cases::Case& every_tensor_case(const std::string& name) {
  const std::vector<cases::Case>& all = cases::every_tensor_cases();
  return *std::find_if(all.begin(), all.end(), [&](const cases::Case& c) { return c.name == "every_tensor/" + name; });
}

// Plans and runs with a workspace of exactly the size asked for, full of NaN, between guards.
inline void plan_and_run(const attune_attention& device) {
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&device, kCpu, &plan));
  size_t bytes = 0;
  EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  {
    cases::Workspace workspace(cases::host_memory(), bytes);
    EXPECT_ATTUNE_OK(attune_run(plan, &device, workspace.buffer.device(), bytes, nullptr));
    EXPECT_EQ(workspace.buffer.check_guards(), "");
  }
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

// The elements of a tensor as bytes, in row-major order of the indices, whatever its strides. Neighbours are copied
// together: one by one they were most of some tests' time under a sanitizer.
inline std::vector<std::byte> gather(attune_tensor t) {
  std::vector<std::byte> bytes;
  auto size = static_cast<size_t>(cases::element_size(static_cast<attune_dtype>(t.dtype)));
  int64_t neighbours = 1;
  if (t.rank > 1 && t.stride[t.rank - 1] == 1) neighbours = t.shape[--t.rank];
  size *= static_cast<size_t>(neighbours);
  cases::for_each_element(t, [&](const int64_t*, void* element) {
    const auto* from = static_cast<const std::byte*>(element);
    bytes.insert(bytes.end(), from, from + size);
  });
  return bytes;
}

inline std::vector<double> gather_values(const attune_tensor& t) {
  std::vector<double> values;
  cases::for_each_element(t, [&](const int64_t*, void* element) {
    values.push_back(cases::decode(static_cast<attune_dtype>(t.dtype), element));
  });
  return values;
}

// Rows [first, first + count) of axis 0.
inline attune_tensor rows_of(attune_tensor t, int64_t first, int64_t count) {
  if (t.dtype == ATTUNE_DTYPE_NONE) return t;
  t.data =
      static_cast<std::byte*>(t.data) + first * t.stride[0] * cases::element_size(static_cast<attune_dtype>(t.dtype));
  t.shape[0] = count;
  return t;
}

// Element by element, whatever the strides; to is as large.
inline void copy_elements(const attune_tensor& from, const attune_tensor& to) {
  const auto size = static_cast<size_t>(cases::element_size(static_cast<attune_dtype>(from.dtype)));
  cases::for_each_element(from, [&](const int64_t* index, const void* element) {
    int64_t offset = 0;
    for (int axis = 0; axis < to.rank; ++axis) offset += index[axis] * to.stride[axis];
    std::memcpy(static_cast<std::byte*>(to.data) + offset * static_cast<int64_t>(size), element, size);
  });
}

// The library's threads while it lives.
class ThreadCount {
 public:
  explicit ThreadCount(int32_t count) { EXPECT_ATTUNE_OK(attune_set_num_threads(count)); }
  ~ThreadCount() { EXPECT_ATTUNE_OK(attune_set_num_threads(0)); }
};

// A dense int32 vector on the heap that a descriptor can point at.
class Int32Vector {
 public:
  explicit Int32Vector(std::vector<int32_t> values) : values_(std::move(values)) {}
  attune_tensor tensor() {
    const auto n = static_cast<int64_t>(values_.size());
    return attune_dense_tensor(values_.data(), ATTUNE_INT32, 1, &n);
  }

 private:
  std::vector<int32_t> values_;
};

}  // namespace attune::tests
