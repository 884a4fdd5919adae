// SPDX-License-Identifier: Apache-2.0
// Private to the kernels_*.cpp files: prefetching of cache rows, whose addresses no hardware prefetcher can guess across pages.
#pragma once

#include <cstdint>

namespace attune::cpu {

inline constexpr int kRowBlock = 16;   // key rows that stay in L1 while all query rows visit them (576 fp32: 36 KB, L2)
inline constexpr int kRowsAhead = 8;   // prefetch distance in key rows
inline constexpr int kPvBlock = 32;    // value rows whose sum stays in registers

// Prefetches n elements of rows[begin..end).
template <class T>
[[gnu::always_inline]] inline void prefetch_rows(const T* const* rows, int begin, int end, int n) {
  const int64_t bytes = static_cast<int64_t>(n) * static_cast<int64_t>(sizeof(T));
  for (int j = begin; j < end; ++j) {
    const char* row = reinterpret_cast<const char*>(rows[j]);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
  }
}

}  // namespace attune::cpu
