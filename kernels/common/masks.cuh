// SPDX-License-Identifier: Apache-2.0
// Masks that are read from tables: bidirectional ranges, which show keys, and key masks, which hide keys.
#pragma once

#include "common/int_table.cuh"
#include "common/kinds.h"

namespace attune::common {

#if !defined(ATTUNE_MASK)
constexpr bool kMayHaveRanges = true;
#else
constexpr bool kMayHaveRanges = (ATTUNE_MASK & use::kRanges) != 0;  // saves registers
#endif

// A bidirectional range of a sequence, inclusive. first >= last: none.
struct Range {
  int first, last;
};
__device__ __forceinline__ Range range_at(const AttentionParams& p, int batch, int i) {
  const int* range = p.ranges + batch * p.range_batch_stride + i * p.range_stride;
  return {range[0], range[p.range_end_stride]};
}
__device__ __forceinline__ bool holds(const Range& range, int position) {
  return range.first < range.last && range.first <= position && position <= range.last;
}

// The masks of ATTUNE_MASK that are looked up key by key, for the rows of one sequence.
template <unsigned kMask>
struct KeyMask {
  static constexpr bool kAny = (kMask & use::kKeyMasks) != 0;

  KeyMasks::Rows rows;

  // q_begin: the sequence's first row in a ragged q.
  __device__ __forceinline__ void start(const AttentionParams& p, int batch, long long q_begin) {
    const long long first_row =
        p.cu_seqlens_q.data != nullptr ? q_begin : static_cast<long long>(batch) * p.fixed_q;
    rows = p.key_masks.rows(batch, first_row);
  }
  __device__ __forceinline__ bool sees(const AttentionParams& p, int query, int head, int key) const {
    return p.key_masks.sees(rows, query, head, key);
  }
};

}  // namespace attune::common
