// SPDX-License-Identifier: Apache-2.0
// The sequence of a row and the cache slot of its token, computed once for each token, before rows are moved. As in
// docs/semantics.md, values of tables are clamped, and tokens without a slot are masked.
#pragma once

#include "common/int_table.cuh"
#include "rows/rows_params.h"

namespace attune::rows {

using common::int_at;
using kernels::IntTable;
using kernels::kMaxTileTokens;
using kernels::kRowsThreads;
using kernels::RowCache;
using kernels::RowTokens;

__device__ __forceinline__ long long clamp(long long x, long long lo, long long hi) {
  return x < lo ? lo : x > hi ? hi : x;
}

// A row's sequence, and its number within the sequence. sequence -1: the row belongs to no sequence.
struct Owner {
  int sequence;
  long long index, count;
};

// A token's slot. page -1: there is none.
struct Slot {
  long long page, offset;
};

__device__ __forceinline__ Slot slot_of_number(const RowCache& c, long long slot) {
  if (slot < 0 || slot >= c.num_pages * c.page_size) return {-1, 0};
  const long long page = slot / c.page_size;
  return {page, slot - page * c.page_size};
}

// The slot of position t of a sequence. The cache must hold that position.
__device__ __forceinline__ Slot slot_of_position(const RowCache& c, const IntTable& table, int sequence, long long t) {
  if (c.ring_capacity > 0) t %= c.ring_capacity;
  if (!c.paged) {
    const long long row = c.batch_index.data != nullptr ? int_at(c.batch_index, sequence) : sequence;
    return {row >= 0 && row < c.num_pages ? row : -1, t};
  }
  const long long column = t / c.page_size;
  const long long page = table.data[sequence * table.row_stride + column * table.column_stride];
  return {page >= 0 && page < c.num_pages ? page : -1, t - column * c.page_size};
}

// The slots of K and V. Both pages are -1 if either is.
struct SlotPair {
  Slot k, v;
};
__device__ __forceinline__ SlotPair slots_of_position(const RowCache& c, int sequence, long long t, bool with_v) {
  SlotPair s;
  s.k = slot_of_position(c, c.page_table, sequence, t);
  s.v = with_v && c.v_page_table.data != nullptr ? slot_of_position(c, c.v_page_table, sequence, t) : s.k;
  if (s.k.page < 0 || s.v.page < 0) s.k.page = s.v.page = -1;
  return s;
}

// Prefix maximum: the largest x of this lane and the lanes before it.
__device__ __forceinline__ long long running_max(long long x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long other = __shfl_up_sync(0xffffffffu, x, step);
    if (static_cast<int>(threadIdx.x % 32) >= step && other > x) x = other;
  }
  return x;
}

// Finds the sequences of rows first..first + count - 1 from cu_seqlens. The whole block calls it. Offsets are clamped
// to the rows and made monotonic: sequence b has the rows from max(offsets up to b) to max(offsets up to b + 1).
__device__ __forceinline__ void find_owners(const RowTokens& t, long long first, int count, Owner* owners) {
  constexpr int kEach = 4, kWarps = kRowsThreads / 32;
  __shared__ long long warp_max[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < count; i += kRowsThreads) owners[i] = {-1, 0, 0};
  const long long offsets = static_cast<long long>(t.batch) + 1, end = first + count;
  long long before = 0;  // the largest offset so far
  for (long long base = 0; base < offsets; base += kRowsThreads * kEach) {
    long long own[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const long long j = base + threadIdx.x * kEach + e;
      own[e] = j < offsets ? clamp(int_at(t.cu_seqlens, j), 0, t.total) : 0;
      if (e > 0 && own[e] < own[e - 1]) own[e] = own[e - 1];
    }
    const long long upto = running_max(own[kEach - 1]);
    __syncthreads();  // owners are cleared, and the previous round has read warp_max
    if (lane == 31) warp_max[warp] = upto;
    __syncthreads();
    long long begin = before, next = before;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp && warp_max[w] > begin) begin = warp_max[w];
      if (warp_max[w] > next) next = warp_max[w];
    }
    const long long of_lane = __shfl_up_sync(0xffffffffu, upto, 1);
    if (lane > 0 && of_lane > begin) begin = of_lane;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const long long j = base + threadIdx.x * kEach + e;
      const long long stop = own[e] > begin ? own[e] : begin;
      if (j > 0 && j < offsets) {
        for (long long r = begin > first ? begin : first; r < stop && r < end; ++r)
          owners[r - first] = {static_cast<int>(j - 1), r - begin, stop - begin};
      }
      begin = stop;
    }
    before = next;
    if (before >= end) break;  // block-uniform
  }
  __syncthreads();
}

__device__ __forceinline__ Owner fixed_owner(const RowTokens& t, long long row) {
  const long long b = t.fixed == 1 ? row : row / t.fixed;
  return {static_cast<int>(b), row - b * t.fixed, t.fixed};
}

__device__ __forceinline__ bool is_finished(const RowTokens& t, int sequence) {
  return t.finished != nullptr && t.finished[sequence * t.finished_stride] != 0;
}

// Calls f(i, row, owner) for the rows of this block, one thread for each, then synchronises. Returns their number.
template <class F>
__device__ __forceinline__ int for_each_token(const RowTokens& t, F f) {
  __shared__ Owner owners[kMaxTileTokens];
  const long long first = static_cast<long long>(blockIdx.x) * t.tile;
  const int count = static_cast<int>(t.total - first < t.tile ? t.total - first : t.tile);
  const bool by_table = t.cu_seqlens.data != nullptr;
  if (by_table) find_owners(t, first, count, owners);
  for (int i = threadIdx.x; i < count; i += kRowsThreads) {
    const Owner owner = t.by_slots ? Owner{-1, 0, 0} : by_table ? owners[i] : fixed_owner(t, first + i);
    f(i, first + i, owner);
  }
  __syncthreads();
  return count;
}

__device__ __forceinline__ Slot slot_of_row(const RowTokens& t, const RowCache& c, long long row) {
  return slot_of_number(c, t.slots != nullptr ? t.slots[row * t.slot_stride] : row);
}

// The destination of a row. Pages of -1: the cache does not store it.
struct Target {
  bool written;        // false: the row is skipped
  long long position;  // in the sequence
  SlotPair slots;
};
__device__ __forceinline__ Target target_of(const RowTokens& t, const RowCache& c, bool append, bool with_v,
                                            long long row, const Owner& owner) {
  Target target = {true, 0, {{-1, 0}, {-1, 0}}};
  if (t.by_slots) {
    target.slots.k = target.slots.v = slot_of_row(t, c, row);
    return target;
  }
  target.written = owner.sequence >= 0 && !is_finished(t, owner.sequence);
  if (!target.written) return target;
  long long used = t.seqused.data != nullptr ? int_at(t.seqused, owner.sequence) : 0;
  used = used < 0 ? 0 : t.clamp_used && used > c.capacity ? c.capacity : used;
  target.position = used + owner.index;
  // In a ring the last tokens of this call overwrite the earlier ones.
  if (append && (c.ring_capacity > 0 ? owner.index >= owner.count - c.ring_capacity : target.position < c.capacity))
    target.slots = slots_of_position(c, owner.sequence, target.position, with_v);
  return target;
}

// The source of a row. Pages of -1: the row becomes zeros.
struct Source {
  bool written;  // otherwise the row keeps its contents
  SlotPair slots;
};
__device__ __forceinline__ Source source_of(const RowTokens& t, const RowCache& c, bool with_v, long long row,
                                            const Owner& owner) {
  Source source = {true, {{-1, 0}, {-1, 0}}};
  if (t.by_slots) {
    source.slots.k = source.slots.v = slot_of_row(t, c, row);
    return source;
  }
  const long long used = owner.sequence < 0 ? 0 : int_at(t.seqused, owner.sequence);
  source.written = owner.sequence >= 0 && owner.index < used && (c.ring_capacity > 0 || owner.index < c.capacity);
  if (source.written && (c.ring_capacity == 0 || owner.index >= used - c.ring_capacity))
    source.slots = slots_of_position(c, owner.sequence, owner.index, with_v);
  return source;
}

}  // namespace attune::rows
