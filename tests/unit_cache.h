// SPDX-License-Identifier: Apache-2.0
// A cache whose slots read as numbers, for unit tests of the operations on caches.
#pragma once

#include <cstring>
#include <utility>

#include "unit_tensors.h"

namespace attune::unit {

inline constexpr attune_device kCpuDevice{ATTUNE_DEVICE_CPU, 0};
inline constexpr float kOld = -7.0f;  // what a slot holds before

inline attune_kv_cache empty_cache() {
  attune_kv_cache c;
  std::memset(&c, 0, sizeof(c));
  return c;
}

// One head of one channel: a cache of slots that read as numbers.
struct SlotCache {
  std::vector<float> k, v;
  std::vector<int32_t> table;
  attune_kv_cache c = empty_cache();

  SlotCache(int64_t pages, int64_t page_size) : k(static_cast<size_t>(pages * page_size), kOld), v(k) {
    c.k = dense(k, {pages, page_size, 1, 1});
    c.v = dense(v, {pages, page_size, 1, 1});
  }
  void paged(std::vector<int32_t> entries, int64_t batch) {
    table = std::move(entries);
    c.page_table = dense(table, {batch, static_cast<int64_t>(table.size()) / batch});
  }
};

inline std::vector<float> numbers(size_t n, float first = 1) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) x[i] = first + static_cast<float>(i);
  return x;
}

}  // namespace attune::unit
