// SPDX-License-Identifier: Apache-2.0
// Masks of ATTUNE_MASK: key ranges, which show pairs that causality and windows hide, and bits, which hide pairs. A
// block of keys processes a tile of queries if causality, windows or a range show one of their pairs, even if mask bits
// hide all of them. Then the key blocks that add to a tile of dq are adjacent, and each can compute how many come
// before it.
#pragma once

#include "backward/rows.cuh"

namespace attune::backward {

using KeyMask = common::KeyMask<ATTUNE_MASK>;
constexpr bool kRanges = (ATTUNE_MASK & use::kRanges) != 0, kKeyMasks = kRanges || KeyMask::kAny;

template <class Body>
__device__ __forceinline__ void for_each_range(const BackwardParams& p, int b, const Body& body) {
  for (int i = 0; i < p.num_ranges; ++i) {
    const common::Range range = common::range_at(p, b, i);
    if (range.first < range.last) body(range);
  }
}
__device__ __forceinline__ bool overlaps(const common::Range& range, int first, int last) {
  return range.first <= last && first <= range.last;
}
// The queries whose positions are in a range.
__device__ __forceinline__ Span queries_in(const common::Range& range, const SequenceInfo& s) {
  const long long first_position = static_cast<long long>(s.num_keys) - s.num_q;
  return {clamp_int(range.first - first_position, 0, s.num_q),
          clamp_int(range.last + 1ll - first_position, 0, s.num_q)};
}

// The keys of a range.
__device__ __forceinline__ Span keys_in(const common::Range& range, const SequenceInfo& s) {
  return {clamp_int(range.first, 0, s.num_keys), clamp_int(range.last + 1ll, 0, s.num_keys)};
}

// `queries` has those that see one of keys first .. last by causality and windows. Widens it by ranges to all queries
// from the first to the last that see one. Both ends stay monotonic in the keys.
__device__ __forceinline__ void widen_by_ranges(const BackwardParams& p, const SequenceInfo& s, int b, int first,
                                                int last, Span& queries) {
  if constexpr (!kRanges) return;
  for_each_range(p, b, [&](const common::Range& range) {
    const Span more = queries_in(range, s);
    if (!overlaps(range, first, last) || more.begin >= more.end) return;
    queries = {min(queries.begin, more.begin), max(queries.end, more.end)};
  });
}
// `keys` has those that queries first .. last see by causality and windows. Widens it by ranges to all keys from the
// first to the last that they see.
__device__ __forceinline__ void widen_keys_by_ranges(const BackwardParams& p, const SequenceInfo& s, int b, int first,
                                                     int last, Span& keys) {
  if constexpr (!kRanges) return;
  for_each_range(p, b, [&](const common::Range& range) {
    const Span queries = queries_in(range, s), more = keys_in(range, s);
    if (queries.begin > last || queries.end <= first || more.begin >= more.end) return;
    keys = keys.begin < keys.end ? Span{min(keys.begin, more.begin), max(keys.end, more.end)} : more;
  });
}
// The queries from the first to the last that see one of the keys of a block, whatever the mask bits are.
__device__ __forceinline__ Span queries_of_block(const BackwardParams& p, const SequenceInfo& s, int b, int begin) {
  const int last = min(begin + kBackwardRows, s.num_keys) - 1;
  if (last < begin) return {0, 0};
  Span seen = {queries_of_key(p, s, begin).begin, queries_of_key(p, s, last).end};
  widen_by_ranges(p, s, b, begin, last, seen);
  return seen;
}
// The first key that query `row` or a later one sees, whatever the mask bits are.
__device__ __forceinline__ int first_key_from(const BackwardParams& p, const SequenceInfo& s, int b, int row) {
  int key = keys_of_query(p, s, row).begin;
  if constexpr (kRanges) {
    for_each_range(p, b, [&](const common::Range& range) {
      if (range.last >= s.num_keys - s.num_q + row) key = min(key, max(range.first, 0));
    });
  }
  return key;
}
// Whether a query sees any key, whatever the mask bits are.
__device__ __forceinline__ bool sees_any(const BackwardParams& p, const SequenceInfo& s, int b, int row) {
  const Span keys = keys_of_query(p, s, row);
  bool any = keys.begin < keys.end;
  if constexpr (kRanges) {
    const int position = s.num_keys - s.num_q + row;
    for_each_range(p, b, [&](const common::Range& range) {
      any |= s.num_keys > 0 && common::holds(range, position) && overlaps(range, 0, s.num_keys - 1);
    });
  }
  return any;
}

// Whether the masks that are looked up key by key show a pair.
__device__ __forceinline__ bool passes_key_mask(const BackwardParams& p, const SequenceInfo& s, int b, int row,
                                                int head, int key) {
  if constexpr (!KeyMask::kAny) return true;
  KeyMask key_mask;
  key_mask.start(p, b, s.q_begin);
  return key_mask.sees(p, row, head, key);
}
// Whether a query sees a key of its sequence.
__device__ __forceinline__ bool sees(const BackwardParams& p, const SequenceInfo& s, int b, int row, int head,
                                     int key) {
  const Span keys = keys_of_query(p, s, row);
  bool any = keys.begin <= key && key < keys.end;
  if constexpr (kRanges) {
    const int position = s.num_keys - s.num_q + row;
    for_each_range(
        p, b, [&](const common::Range& range) { any |= common::holds(range, position) && common::holds(range, key); });
  }
  return any && passes_key_mask(p, s, b, row, head, key);
}

}  // namespace attune::backward
