// SPDX-License-Identifier: Apache-2.0
// What follows from the lengths on the device: the sequences, the keys that a block of rows may see, and the tiles of
// those keys.
#pragma once

#include "common/masks.cuh"
#include "common/work_tile_params.h"

namespace attune::scheduler {

using kernels::WorkTileParams;
using kernels::WorkTile;
using common::clamp_int;
using common::int_at;

struct SequenceInfo {
  long long q_begin, q_row, kv_row;  // as in WorkTile
  int num_q, num_cached, num_keys;
  int skipped;     // rows become zero, or keep their contents
  int row_blocks;  // 0: no work
};

// kSparse: rows attend to the entries of lists, not to the keys of a sequence.
template <bool kSparse = false>
__device__ __forceinline__ SequenceInfo read_sequence(const WorkTileParams& p, int b) {
  SequenceInfo s{};
  if (p.cu_seqlens_q.data != nullptr) {
    s.q_begin = s.q_row = clamp_int(int_at(p.cu_seqlens_q, b), 0, p.total_q);
    s.num_q = clamp_int(int_at(p.cu_seqlens_q, b + 1) - s.q_begin, 0, p.total_q - s.q_begin);
  } else {
    s.num_q = p.fixed_q;
    s.q_row = p.q_flat ? static_cast<long long>(b) * p.fixed_q : 0;
  }
  if (kSparse && p.cached) {
    s.num_keys = 0;
  } else if (p.cached) {
    s.num_cached = clamp_int(int_at(p.seqused_kv, b), 0, p.capacity);
    s.kv_row = p.cu_seqlens_q.data != nullptr ? s.q_begin : p.kv_flat ? static_cast<long long>(b) * p.fixed_q : 0;
    s.num_keys = s.num_cached + (p.dense ? s.num_q : 0);
  } else {
    if (p.cu_seqlens_kv.data != nullptr) {
      s.kv_row = clamp_int(int_at(p.cu_seqlens_kv, b), 0, p.total_kv);
      s.num_keys = clamp_int(int_at(p.cu_seqlens_kv, b + 1) - s.kv_row, 0, p.total_kv - s.kv_row);
    } else {
      s.num_keys = p.fixed_kv;
      s.kv_row = p.kv_flat ? static_cast<long long>(b) * p.fixed_kv : 0;
    }
    if (p.seqused_kv.data != nullptr) s.num_keys = clamp_int(int_at(p.seqused_kv, b), 0, s.num_keys);
  }
  s.skipped =
      (p.finished != nullptr && p.finished[b * p.finished_stride] != 0) || (p.skip_decode && s.num_q == 1) ? 1 : 0;
  const bool left = s.num_q <= p.max_decode_q || (s.skipped && !p.zero_finished);
  s.row_blocks = left ? 0 : (s.num_q + p.tokens_of_tile - 1) / p.tokens_of_tile;
  return s;
}

// The keys [first, end) that a position may see by causality and windows. num_keys is at least the position.
__device__ __forceinline__ int first_visible(const WorkTileParams& p, int position) {
  const int left = static_cast<int>(p.window_left);
  return left >= 0 ? max(max(position, 0) - left, 0) : 0;
}
__device__ __forceinline__ int end_visible(const WorkTileParams& p, int num_keys, int position) {
  // A negative window_right has no limit: it becomes a large unsigned number.
  const unsigned right = p.causal ? 0 : static_cast<unsigned>(p.window_right);
  return max(position + 1 + static_cast<int>(min(right, static_cast<unsigned>(num_keys - 1 - position))), 0);
}

// The tiles of a key range. Cached tiles come first and are page aligned. Dense tiles start at the first visible key.
template <int kKeys, bool kCached = true>
struct KeyTiles {
  int cached_begin, num_cached_tiles, num_tiles;
  int dense_start;  // a key
  __device__ __forceinline__ KeyTiles(int num_cached, int first_key, int end_key) {
    cached_begin = first_key / kKeys;
    num_cached_tiles = 0;
    if (!kCached) num_cached = 0;
    if (first_key < min(end_key, num_cached))
      num_cached_tiles = (min(end_key, num_cached) + kKeys - 1) / kKeys - cached_begin;
    dense_start = max(first_key, num_cached);
    num_tiles = num_cached_tiles;
    if (end_key > dense_start) num_tiles += (end_key - dense_start + kKeys - 1) / kKeys;
  }
  __device__ __forceinline__ bool is_cached(int i) const { return kCached && i < num_cached_tiles; }
  // The first key of tile i.
  __device__ __forceinline__ int start(int i) const {
    return is_cached(i) ? (cached_begin + i) * kKeys : dense_start + (i - num_cached_tiles) * kKeys;
  }
};

// Tiles [begin, end).
struct TileSpan {
  int begin, end;
  __device__ __forceinline__ bool has(int i) const { return begin <= i && i < end; }
};

// One tile, whose keys begin at `start`. Only its keys [low, high) are read.
struct Tile {
  int start, low, high;
  bool cached;
};
template <int kKeys, bool kCached>
__device__ __forceinline__ Tile tile_at(const WorkTile& t, const KeyTiles<kKeys, kCached>& tiles, int i) {
  Tile x;
  x.cached = tiles.is_cached(i);
  x.start = tiles.start(i);
  x.low = max(x.start, t.first_key);
  x.high = max(x.low, min(min(x.start + kKeys, t.end_key), x.cached ? t.num_cached : t.end_key));
  return x;
}

// The number of entries of a list that are in use. row: of q.
__device__ __forceinline__ int entries_in_use(const kernels::SlotList& list, int b, long long row) {
  if (list.indices == nullptr || list.length.data == nullptr) return list.indices == nullptr ? 0 : list.topk;
  return clamp_int(int_at(list.length, list.length_by_row ? row : b), 0, list.topk);
}
// The list of a work tile with one token.
__device__ __forceinline__ const int* entries_of(const kernels::SlotList& list, const WorkTile& t, int kv_head) {
  return list.indices + t.batch * list.batch_stride + (t.q_begin + t.token_begin) * list.row_stride +
         kv_head * list.head_stride;
}
// The row of q, numbered over all sequences.
__device__ __forceinline__ long long row_of_token(const WorkTileParams& p, const WorkTile& t, int token) {
  return (p.cu_seqlens_q.data != nullptr ? t.q_begin : static_cast<long long>(t.batch) * p.fixed_q) + token;
}

// A block of rows, and the keys that causality and windows let it see.
__device__ __forceinline__ WorkTile rows_of_block(const WorkTileParams& p, const SequenceInfo& s, int b, int block) {
  WorkTile t{};
  t.q_begin = s.q_begin, t.q_row = s.q_row, t.kv_row = s.kv_row, t.batch = b;
  t.token_begin = block * p.tokens_of_tile;
  t.num_tokens = min(p.tokens_of_tile, s.num_q - t.token_begin);
  t.num_q = s.num_q, t.num_cached = s.num_cached, t.num_keys = s.num_keys;
  const int position = s.num_keys - s.num_q + t.token_begin;
  t.first_key = first_visible(p, position);
  t.end_key = end_visible(p, s.num_keys, position + t.num_tokens - 1);
  if (t.end_key <= t.first_key) t.first_key = t.end_key = 0;
  return t;
}
// Gives a row block all its tiles as one split. A row block that sees nothing has one tile without keys, so that
// kernels need no special case.
template <int kKeys>
__device__ __forceinline__ void take_all_tiles(WorkTile& t) {
  t.num_splits = 1;
  t.tile_end = max(KeyTiles<kKeys>(t.num_cached, t.first_key, t.end_key).num_tiles, 1);
}

// A whole row block as a work tile with one split. In sparse attention its keys are the entries of its token's lists,
// and entries of the first list count as cached keys.
template <int kKeys, bool kSparse = false>
__device__ __forceinline__ WorkTile block_work(const WorkTileParams& p, const SequenceInfo& s, int b, int block) {
  WorkTile t = rows_of_block(p, s, b, block);
  const int position = s.num_keys - s.num_q + t.token_begin;
  if constexpr (kSparse) {
    const long long row = row_of_token(p, t, t.token_begin);
    t.first_key = 0;
    t.num_cached = entries_in_use(p.list_of_slots, b, row);
    t.end_key = t.num_cached + entries_in_use(p.list_of_extra, b, row);
  }
  for (int i = 0; i < p.num_ranges; ++i) {
    const common::Range range = common::range_at(p, b, i);
    const int first = max(range.first, 0), last = range.last;
    if (range.first >= last || last < position || range.first > position + t.num_tokens - 1) continue;
    const int end = clamp_int(static_cast<long long>(last) + 1, 0, s.num_keys);
    if (first >= end) continue;
    t.first_key = t.end_key == 0 ? first : min(t.first_key, first);
    t.end_key = max(t.end_key, end);
  }
  if (s.skipped) {
    t.first_key = t.end_key = 0;
    if constexpr (kSparse) t.num_cached = 0;  // so far: entries
  }
  take_all_tiles<kKeys>(t);
  return t;
}

}  // namespace attune::scheduler
