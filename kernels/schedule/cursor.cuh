// SPDX-License-Identifier: Apache-2.0
// A walk over a block's share of the line, piece by piece.
#pragma once

#include "schedule/share.cuh"

namespace attune::schedule {

using kernels::Piece;
using kernels::Share;

// Steps to the next piece; live becomes 0 at the end of the share.
template <int kTileKeys, int kBlockRows>
__device__ __forceinline__ void step(const DecodeParams& p, Share& s) {
  s.live = 0;
  if (s.left <= 0) return;
  while (s.within >= line_tiles(p, s.sequence)) {
    s.within -= line_tiles(p, s.sequence);
    if (s.batch + 1 >= p.batch) return;  // lengths are not those of the schedule
    s.sequence = read_sequence<kTileKeys, kBlockRows>(p, ++s.batch);
  }
  const long long pair = divide(s.within, s.sequence.num_tiles);
  const int tile = static_cast<int>(s.within - pair * s.sequence.num_tiles), rest = s.sequence.num_tiles - tile;
  const int count = p.whole_pairs || s.left > rest ? rest : static_cast<int>(s.left);
  const int group = static_cast<int>(divide(pair, s.sequence.row_blocks));
  s.piece.batch = s.batch;
  s.piece.head = group * p.head_lanes + head_lane(p);
  s.piece.row_begin = static_cast<int>(pair - static_cast<long long>(group) * s.sequence.row_blocks) * kBlockRows;
  s.piece.num_rows = min(kBlockRows, s.sequence.num_q * p.group - s.piece.row_begin);
  s.piece.first_tile = s.sequence.first_tile + tile;
  s.piece.end_tile = s.piece.first_tile + count;
  s.piece.starts = tile == 0 ? 1 : 0;
  s.piece.ends = count == rest ? 1 : 0;
  s.piece.pair_begin = s.at - tile;
  s.piece.pair_end = s.at + rest;
  s.at += count, s.left -= count, s.within += count;
  s.live = 1;
}

// The same on a share in shared memory. Steps are few and long, so a kernel has one copy of this.
template <int kTileKeys, int kBlockRows>
__device__ __noinline__ void step_in_place(const DecodeParams& p, Share& share) {
  Share s = share;
  step<kTileKeys, kBlockRows>(p, s);
  share = s;
}

// The share of `count` tiles from tile `first` of the line on, which is tile `within` of sequence `batch`, at its first
// piece.
template <int kTileKeys, int kBlockRows>
__device__ __forceinline__ Share start(const DecodeParams& p, long long total, long long first, long long count,
                                       int batch, long long within) {
  Share s{};
  s.total = total, s.at = first, s.left = count, s.within = within, s.batch = batch;
  if (count <= 0) return s;
  s.sequence = read_sequence<kTileKeys, kBlockRows>(p, batch);
  if (p.whole_pairs) {
    // A pair belongs to the block that its first tile falls to.
    const int tiles = s.sequence.num_tiles, into = static_cast<int>(within - divide(within, tiles) * tiles);
    const int skipped = into == 0 ? 0 : tiles - into;
    s.at += skipped, s.left -= skipped, s.within += skipped;
  }
  step<kTileKeys, kBlockRows>(p, s);
  return s;
}

}  // namespace attune::schedule
