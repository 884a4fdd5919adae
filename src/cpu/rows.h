// SPDX-License-Identifier: Apache-2.0
// Runs of elements of any dtype and stride to fp32 and back, and the loop over the tokens of a batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/tensor.h"
#include "cpu/threads.h"

namespace attune::cpu {

// Reads n elements that are `stride` elements apart, exactly.
void read_elements(int32_t dtype, const std::byte* from, int64_t stride, int64_t n, float* to);
// Writes them, each rounded once (8-bit dtypes saturate).
void write_elements(int32_t dtype, std::byte* to, int64_t stride, int64_t n, const float* from);

inline void read_row(const RowView& view, int64_t row, int64_t head, int64_t n, float* to) {
  read_elements(view.dtype, view.at(row, head), view.dim_stride, n, to);
}
inline void write_row(const RowView& view, int64_t row, int64_t head, int64_t n, const float* from) {
  write_elements(view.dtype, view.at(row, head), view.dim_stride, n, from);
}

// Consecutive rows of a tensor that belong to one sequence.
struct RowRange {
  int64_t first = 0, count = 0;
};

// Rows of each sequence by cu_seqlens, or `fixed` each. Must be called with b = 0, 1, .. in order. Ranges lie in the
// tensor and do not overlap, whatever the table says.
class RowSplitter {
 public:
  RowSplitter(const IntView& cu, int64_t fixed, int64_t total) : cu_(cu), fixed_(fixed), total_(total) {}
  RowRange operator()(int64_t b) {
    if (!cu_) return {b * fixed_, fixed_};
    const int64_t first = std::clamp<int64_t>(cu_(b), end_, total_);
    end_ = std::clamp<int64_t>(cu_(b + 1), first, total_);
    return {first, end_ - first};
  }

 private:
  IntView cu_;
  int64_t fixed_, total_, end_ = 0;
};

// Calls body(b, i, row, count) in parallel for row i of the `count` rows of range(b), for every sequence b. range is
// called in order, from one thread.
template <class Range, class Body>
void for_each_sequence_row(int64_t batch, Range&& range, Body&& body) {
  constexpr int64_t kBlock = 256;  // sequences at a time: their ranges fit the stack
  RowRange ranges[kBlock];
  int64_t ends[kBlock];
  for (int64_t base = 0; base < batch; base += kBlock) {
    const int64_t n = std::min(kBlock, batch - base);
    int64_t total = 0;
    for (int64_t s = 0; s < n; ++s) {
      ranges[s] = range(base + s);
      ends[s] = total += ranges[s].count;
    }
    parallel_for(total, [&](int64_t item) {
      const int64_t s = std::upper_bound(ends, ends + n, item) - ends;
      const int64_t i = item - (ends[s] - ranges[s].count);
      body(base + s, i, ranges[s].first + i, ranges[s].count);
    });
  }
}

}  // namespace attune::cpu
