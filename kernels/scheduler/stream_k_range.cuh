// SPDX-License-Identifier: Apache-2.0
// The walk over a block's stream-K range, one split at a time.
#pragma once

#include "scheduler/stream_k_partition.cuh"

namespace attune::scheduler {

using kernels::Split;
using kernels::StreamKRange;

// Advances to the next split. live is 0 at the end of the range.
template <int kTileKeys, int kBlockRows>
__device__ __forceinline__ void advance(const AttentionParams& p, StreamKRange& s) {
  s.live = 0;
  if (s.tiles_left <= 0) return;
  while (s.tile_in_sequence >= tiles_of_sequence(p, s.sequence)) {
    s.tile_in_sequence -= tiles_of_sequence(p, s.sequence);
    if (s.batch + 1 >= p.batch) return;  // the schedule was made for other lengths
    s.sequence = read_sequence<kTileKeys, kBlockRows>(p, ++s.batch);
  }
  const long long output_tile = divide(s.tile_in_sequence, s.sequence.num_tiles);
  const int tile = static_cast<int>(s.tile_in_sequence - output_tile * s.sequence.num_tiles),
            rest = s.sequence.num_tiles - tile;
  const int count = p.whole_pairs || s.tiles_left > rest ? rest : static_cast<int>(s.tiles_left);
  const int group = static_cast<int>(divide(output_tile, s.sequence.row_blocks));
  s.split.batch = s.batch;
  s.split.head = group * p.head_lanes + head_lane(p);
  s.split.row_begin =
      static_cast<int>(output_tile - static_cast<long long>(group) * s.sequence.row_blocks) * kBlockRows;
  s.split.num_rows = min(kBlockRows, s.sequence.num_q * p.group - s.split.row_begin);
  s.split.first_tile = s.sequence.first_tile + tile;
  s.split.end_tile = s.split.first_tile + count;
  s.split.is_first = tile == 0 ? 1 : 0;
  s.split.is_last = count == rest ? 1 : 0;
  s.split.output_tile_begin = s.next_tile - tile;
  s.split.output_tile_end = s.next_tile + rest;
  s.next_tile += count, s.tiles_left -= count, s.tile_in_sequence += count;
  s.live = 1;
}

// Advances a range in shared memory. The code is rare and long, so a kernel has one copy of it.
template <int kTileKeys, int kBlockRows>
__device__ __noinline__ void advance_in_place(const AttentionParams& p, StreamKRange& range) {
  StreamKRange s = range;
  advance<kTileKeys, kBlockRows>(p, s);
  range = s;
}

// The range of `count` tiles from tile `first` on, at its first split. Tile `first` is tile `tile_in_sequence` of
// sequence `batch`.
template <int kTileKeys, int kBlockRows>
__device__ __forceinline__ StreamKRange start(const AttentionParams& p, long long total, long long first,
                                              long long count, int batch, long long tile_in_sequence) {
  StreamKRange s{};
  s.total_tiles = total, s.next_tile = first, s.tiles_left = count, s.tile_in_sequence = tile_in_sequence;
  s.batch = batch;
  if (count <= 0) return s;
  s.sequence = read_sequence<kTileKeys, kBlockRows>(p, batch);
  if (p.whole_pairs) {
    // An output tile belongs to the range that has its first key tile.
    const int tiles = s.sequence.num_tiles,
              into = static_cast<int>(tile_in_sequence - divide(tile_in_sequence, tiles) * tiles);
    const int skipped = into == 0 ? 0 : tiles - into;
    s.next_tile += skipped, s.tiles_left -= skipped, s.tile_in_sequence += skipped;
  }
  advance<kTileKeys, kBlockRows>(p, s);
  return s;
}

}  // namespace attune::scheduler
