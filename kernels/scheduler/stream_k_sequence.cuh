// SPDX-License-Identifier: Apache-2.0
// From the lengths on the device to a sequence: its queries, the keys that they may see, and the tiles of those keys.
#pragma once

#include "common/masks.cuh"
#include "scheduler/stream_k_params.h"

namespace attune::scheduler {

using common::clamp_int;
using common::int_at;
using common::kMayHaveRanges;
using kernels::AttentionParams;
using kernels::Sequence;

__device__ __forceinline__ bool is_finished(const AttentionParams& p, int b) {
  return p.finished != nullptr && p.finished[b * p.finished_stride] != 0;
}

// Fills all fields of sequence b except q_begin and num_q, which are set already. used: its entry of seqused_kv.
template <int kTileKeys, int kBlockRows>
__device__ __forceinline__ void complete_sequence(const AttentionParams& p, int b, int used, bool finished,
                                                  Sequence& s) {
  const int num_cached = used < 0 ? 0 : p.ring_capacity > 0 ? used : min(used, p.capacity);
  const bool skipped = finished || (p.skip_decode && s.num_q == 1);
  const int rows = s.num_q * p.group;
  s.num_new = p.new_k.data != nullptr && !skipped ? s.num_q : 0;
  s.num_keys = num_cached + s.num_new;
  s.row_blocks = skipped && !p.zero_finished ? 0 : (rows + kBlockRows - 1) / kBlockRows;

  const int first_position = s.num_keys - s.num_q, last_position = s.num_keys - 1;
  int first = 0, end = num_cached;
  if (p.window_left >= 0) first = static_cast<int>(max(first_position - p.window_left, 0ll));
  if (p.window_right >= 0) end = static_cast<int>(min(last_position + p.window_right + 1, static_cast<long long>(end)));
  for (int i = 0; kMayHaveRanges && i < p.num_ranges; ++i) {
    const common::Range range = common::range_at(p, b, i);
    if (range.first >= range.last || range.last < first_position || range.first > last_position) continue;
    first = min(first, max(range.first, 0));
    end = max(end, range.last < num_cached ? range.last + 1 : num_cached);
  }
  if (p.ring_capacity > 0) first = max(first, num_cached - p.ring_capacity);
  if (skipped || end < first) end = first;
  s.first_key = first;
  s.end_key = end;
  s.first_tile = s.first_key / kTileKeys;
  s.num_tiles = end > first ? (s.end_key - 1) / kTileKeys - s.first_tile + 1 : 1;
}

template <int kTileKeys, int kBlockRows>
__device__ __forceinline__ Sequence read_sequence(const AttentionParams& p, int b) {
  Sequence s{};
  if (p.cu_seqlens_q.data != nullptr) {
    s.q_begin = clamp_int(int_at(p.cu_seqlens_q, b), 0, p.total_q);
    s.num_q = clamp_int(int_at(p.cu_seqlens_q, b + 1) - s.q_begin, 0, p.total_q - s.q_begin);
  } else {
    s.q_begin = 0;
    s.num_q = p.fixed_q;
  }
  const bool finished = is_finished(p, b);
  complete_sequence<kTileKeys, kBlockRows>(p, b, int_at(p.seqused_kv, b), finished, s);
  if (s.num_q > p.max_decode_q) s.row_blocks = 0;
  return s;
}

// The head lane of this block (AttentionParams::head_lanes).
__device__ __forceinline__ int head_lane(const AttentionParams& p) {
  return static_cast<int>(blockIdx.x) & (p.head_lanes - 1);
}

// The stream-K tiles of a sequence. Their order: groups of heads, row blocks, key tiles.
__device__ __forceinline__ long long tiles_of_sequence(const AttentionParams& p, const Sequence& s) {
  return static_cast<long long>(p.num_heads_kv / p.head_lanes) * s.row_blocks * s.num_tiles;
}

}  // namespace attune::scheduler
