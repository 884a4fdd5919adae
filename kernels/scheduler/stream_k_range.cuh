// SPDX-License-Identifier: Apache-2.0
// The walk over a block's stream-K range, one split at a time.
#pragma once

#include "scheduler/stream_k_partition.cuh"

namespace attune::scheduler {

using kernels::Split;
using kernels::StreamKRange;

// Sets the split that begins at tile `tile` of the output tile whose head and row_begin are set.
template <int kBlockRows>
__device__ __forceinline__ void set_split(const AttentionParams& p, StreamKRange& s, int tile) {
  const int rest = s.sequence.num_tiles - tile;
  const int count = s.whole != 0 || s.tiles_left > rest ? rest : static_cast<int>(s.tiles_left);
  s.split.batch = s.batch;
  s.split.num_rows = min(kBlockRows, s.sequence.num_q * p.group - s.split.row_begin);
  s.split.first_tile = s.sequence.first_tile + tile;
  s.split.end_tile = s.split.first_tile + count;
  s.split.is_first = tile == 0 ? 1 : 0;
  s.split.is_last = count == rest ? 1 : 0;
  s.split.output_tile_begin = s.next_tile - tile;
  s.split.output_tile_end = s.next_tile + rest;
  s.next_tile += count, s.tiles_left -= count;
  s.live = 1;
}

// Sets the first split of a range. live stays 0 if the range is empty.
template <int kTileKeys, int kBlockRows>
__device__ __forceinline__ void start(const AttentionParams& p, StreamKRange& s) {
  if (s.tiles_left <= 0) return;
  while (s.tile_in_sequence >= tiles_of_sequence(p, s.sequence)) {
    s.tile_in_sequence -= tiles_of_sequence(p, s.sequence);
    s.sequence = read_sequence<kTileKeys, kBlockRows>(p, ++s.batch);
  }
  const long long output_tile = divide(s.tile_in_sequence, s.sequence.num_tiles);
  const int group = static_cast<int>(divide(output_tile, s.sequence.row_blocks));
  s.split.head = group * p.head_lanes + head_lane(p);
  s.split.row_begin =
      static_cast<int>(output_tile - static_cast<long long>(group) * s.sequence.row_blocks) * kBlockRows;
  set_split<kBlockRows>(p, s, static_cast<int>(s.tile_in_sequence - output_tile * s.sequence.num_tiles));
}

// Advances in place to the next split, which begins the next output tile. live becomes 0 at the end of the range. The
// range is in shared memory: one thread advances it, and its warp waits. Not inlined, because the code is long.
template <int kTileKeys, int kBlockRows>
__device__ __noinline__ void advance(const AttentionParams& p, StreamKRange& s) {
  s.live = 0;
  if (s.tiles_left <= 0) return;
  int row_begin = s.split.row_begin + kBlockRows, head = s.split.head;
  if (row_begin >= s.sequence.row_blocks * kBlockRows) {
    row_begin = 0, head += p.head_lanes;
    if (head >= p.num_heads_kv) {
      head = head_lane(p);
      do {
        if (s.batch + 1 >= p.batch) return;  // the schedule was made for other lengths
        s.sequence = read_sequence<kTileKeys, kBlockRows>(p, ++s.batch);
      } while (s.sequence.row_blocks == 0);
    }
  }
  s.split.row_begin = row_begin, s.split.head = head;
  set_split<kBlockRows>(p, s, 0);
}

// The tiles from the begin of a range to the next begin of an output tile; 0 if they coincide. Call it before start().
__device__ __forceinline__ int tiles_to_next(const StreamKRange& s) {
  const int tiles = s.sequence.num_tiles,
            into = static_cast<int>(s.tile_in_sequence - divide(s.tile_in_sequence, tiles) * tiles);
  return into == 0 ? 0 : tiles - into;
}

}  // namespace attune::scheduler
