// SPDX-License-Identifier: Apache-2.0
// Whether the elements of two tensors can share bytes.
#pragma once

#include <cstdint>

#include "attune/attune.h"

namespace attune {

struct ByteRange {
  uintptr_t begin = 0, end = 0;
};
// From the first element to the end of the last; empty where the tensor is not given or has no elements.
ByteRange byte_range(const attune_tensor& t);
inline bool meet(const ByteRange& a, const ByteRange& b) { return a.begin < b.end && b.begin < a.end; }

// False if they cannot: their byte ranges are disjoint, or they are different columns of one packed buffer (q, k and v
// side by side). True does not prove that they do.
bool may_overlap(const attune_tensor& a, const attune_tensor& b);

// Whether `out` may replace `in` in place when each innermost row is read whole before it is written: the same rows at
// the same addresses.
bool same_rows(const attune_tensor& out, const attune_tensor& in);

}  // namespace attune
