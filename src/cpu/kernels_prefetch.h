// SPDX-License-Identifier: Apache-2.0
// Prefetching of cache rows for the decode loops. Pages lie anywhere, so hardware prefetchers stop at the end of each.
// The row functions do not know what comes after their tile; the loop that calls them does.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace attune::cpu {

// Keeps the prefetches of a row: GCC takes a function that only prefetches for one without effect and drops its calls.
[[gnu::always_inline]] inline void keep_requests(const void* row) { asm volatile("" : : "r"(row)); }

// Prefetches those of the rows [begin, begin + n) of `ahead` that exist.
[[gnu::always_inline]] inline void prefetch_rows(const RowsAhead& ahead, int begin, int n) {
  const int end = begin + n < ahead.n ? begin + n : ahead.n;
  for (int j = begin; j < end; ++j) {
    const char* row = static_cast<const char*>(ahead.rows[j]) + ahead.behind;
    keep_requests(row);
    for (int64_t i = 0; i < ahead.bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }
}

// Prefetches rows [begin, end) of k and v into L2, k_behind and v_behind bytes after their addresses. (Requests for L1
// queue in fewer places.) The two alternate row by row, as two streams keep more of the memory busy. v may equal k or
// be null: then k only.
[[gnu::always_inline]] inline void prefetch_tile(const void* const* k, int64_t k_bytes, const void* const* v,
                                                 int64_t v_bytes, int begin, int end, int64_t k_behind = 0,
                                                 int64_t v_behind = 0) {
  const bool both = v != nullptr && v != k;
  for (int j = begin; j < end; ++j) {
    const char* k_row = static_cast<const char*>(k[j]) + k_behind;
    keep_requests(k_row);
    for (int64_t i = 0; i < k_bytes; i += 64) __builtin_prefetch(k_row + i, 0, 2);
    if (!both) continue;
    const char* v_row = static_cast<const char*>(v[j]) + v_behind;
    for (int64_t i = 0; i < v_bytes; i += 64) __builtin_prefetch(v_row + i, 0, 2);
  }
}

}  // namespace attune::cpu
