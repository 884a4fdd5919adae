// SPDX-License-Identifier: Apache-2.0
// Masks that are tables: bidirectional ranges, which show keys, and masks that hide them key by key.
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
  static_assert(use::kKeyMasks == use::kBits, "sees() has all of them");
  static constexpr bool kAny = (kMask & use::kKeyMasks) != 0;

  long long first_row;  // of the bits: the row of query 0
  int first_key;        // that the bits cover

  // q_begin: the sequence's first row of a ragged q.
  __device__ __forceinline__ void start(const AttentionParams& p, int batch, long long q_begin) {
    first_row = p.cu_seqlens_q.data != nullptr ? q_begin : static_cast<long long>(batch) * p.fixed_q;
    first_key = p.key_masks.start_of(batch);
  }
  __device__ __forceinline__ bool sees(const AttentionParams& p, int query, int head, int key) const {
    const KeyMasks& m = p.key_masks;
    const long long column = static_cast<long long>(key) - first_key;
    if (column < 0 || column >= m.columns) return true;
    const unsigned char byte =
        m.bits[(first_row + query) * m.row_stride + head * m.head_stride + (column >> 3) * m.byte_stride];
    return (byte >> (column & 7) & 1) != 0;
  }
};

}  // namespace attune::common
