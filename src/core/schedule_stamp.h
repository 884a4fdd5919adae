// SPDX-License-Identifier: Apache-2.0
// A hash of everything that a schedule depends on. A run compares its own with the schedule's.
#pragma once

#include "core/problem.h"

namespace attune {

class Stamp {
 public:
  void add(int64_t x) {
    value_ = (value_ ^ static_cast<uint64_t>(x)) * 0x9e3779b97f4a7c15u;
    value_ ^= value_ >> 32;
  }
  void add(const IntView& t) {
    for (int64_t i = 0; t && i < t.cols; ++i) add(t(i));
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

// The part that the descriptor gives: shapes and windows, which may differ between runs of one plan.
inline Stamp stamp_of_shapes(const Problem& p) {
  Stamp stamp;
  for (const int64_t x : {p.batch, p.total_q, p.fixed_q, p.fixed_kv, p.k.rows, p.list.topk, p.extra_list.topk,
                          p.window_left, p.window_right, p.num_ranges, p.cache.ring_capacity})
    stamp.add(x);
  return stamp;
}

}  // namespace attune
