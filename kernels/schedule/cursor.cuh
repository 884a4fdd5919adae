// SPDX-License-Identifier: Apache-2.0
// A walk over a block's share of the line, piece by piece. A piece is a run of key tiles of one (sequence, head, row block).
#pragma once

#include "schedule/share.cuh"

namespace attune::schedule {

struct Piece {
  int batch, head;
  int row_begin, num_rows;   // packed rows of the sequence: query-major, the heads of a KV head inside
  int first_tile, end_tile;  // of 64 or so keys, counted from key 0
  bool starts, ends;         // holds the first, the last tile of its pair
  long long pair_begin, pair_end;  // tiles of the line
};

template <int kTileKeys, int kBlockRows>
struct Cursor {
  long long at, left, within;  // tile of the line, tiles left, tile of the sequence
  int batch;
  Sequence sequence;

  __device__ __forceinline__ void start(const DecodeParams& p, const Share& share) {
    at = share.first, left = share.count, within = share.within, batch = share.batch;
    if (left <= 0) return;
    sequence = read_sequence<kTileKeys, kBlockRows>(p, batch);
    if (p.whole_pairs) {
      // A pair belongs to the block that its first tile falls to.
      const long long skipped = (sequence.num_tiles - (within - divide(within, sequence.num_tiles) * sequence.num_tiles)) % sequence.num_tiles;
      at += skipped, left -= skipped, within += skipped;
    }
  }

  // False at the end of the share.
  __device__ __forceinline__ bool next(const DecodeParams& p, Piece& piece) {
    if (left <= 0) return false;
    while (within >= line_tiles(p, sequence)) {
      within -= line_tiles(p, sequence);
      if (batch + 1 >= p.batch) {  // lengths are not those of the schedule
        left = 0;
        return false;
      }
      sequence = read_sequence<kTileKeys, kBlockRows>(p, ++batch);
    }
    const long long pair = divide(within, sequence.num_tiles);
    const int tile = static_cast<int>(within - pair * sequence.num_tiles);
    const int rest = sequence.num_tiles - tile;
    const int count = p.whole_pairs || left > rest ? rest : static_cast<int>(left);
    const int head = static_cast<int>(divide(pair, sequence.row_blocks));
    piece.batch = batch;
    piece.head = head;
    piece.row_begin = static_cast<int>(pair - static_cast<long long>(head) * sequence.row_blocks) * kBlockRows;
    piece.num_rows = min(kBlockRows, sequence.num_q * p.group - piece.row_begin);
    piece.first_tile = sequence.first_tile + tile;
    piece.end_tile = piece.first_tile + count;
    piece.starts = tile == 0;
    piece.ends = count == rest;
    piece.pair_begin = at - tile;
    piece.pair_end = at + rest;
    at += count, left -= count, within += count;
    return true;
  }
};

// A walk in shared memory: one thread steps, the others read.
template <int kTileKeys, int kBlockRows>
struct Walk {
  Cursor<kTileKeys, kBlockRows> cursor;
  Piece piece;
  int live;

  __device__ __forceinline__ void start(const DecodeParams& p, const Share& share) {
    cursor.start(p, share);
    step(p);
  }
  __device__ __forceinline__ void step(const DecodeParams& p) { live = cursor.next(p, piece) ? 1 : 0; }
};

}  // namespace attune::schedule
