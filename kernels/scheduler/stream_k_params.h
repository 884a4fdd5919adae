// SPDX-License-Identifier: Apache-2.0
// Decode's stream-K schedule in the workspace. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

namespace attune::kernels {

constexpr int kKeysOfWarp = 16;  // keys of a tile that one warp takes

// A sequence, from the lengths on the device: its queries, the keys that they may see, and the tiles of those keys.
struct Sequence {
  long long q_begin;  // the first row of q; 0 if each sequence numbers its rows from 0
  int num_q;
  int num_keys;               // cached and new
  int first_key, end_key;     // the cached keys that some query may see
  int first_tile, num_tiles;  // the tiles of those keys; one empty tile if there are none
  int row_blocks;             // blocks of packed rows; 0: no work
  int num_new;                // new tokens, the last of num_keys; 0 if there is no work
};

// A run of key tiles of one output tile, which is a (sequence, KV head, row block).
struct Split {
  int batch, head;
  int row_begin, num_rows;   // packed rows of the sequence: queries outside, the heads of a KV head inside
  int first_tile, end_tile;  // counted from key 0
  int is_first, is_last;     // whether the split has the first, and the last, tile of its output tile
  long long output_tile_begin, output_tile_end;  // the stream-K tiles of the whole output tile
};

// A block's stream-K range, and the current split of the walk over it. The schedule kernel sets it to the first split.
struct alignas(16) StreamKRange {
  long long total_tiles;  // of the call
  long long next_tile, tiles_left;
  long long tile_in_sequence;  // of next_tile, until the first split is set
  int batch;
  int live;        // there is a current split
  int blocks;      // the most ranges into which the tiles are cut
  unsigned stamp;  // common/stamp.cuh
  int whole;       // no output tile is cut: each belongs to the range that has its first tile
  Sequence sequence;
  Split split;
};

}  // namespace attune::kernels
