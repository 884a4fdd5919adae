// SPDX-License-Identifier: Apache-2.0
// The stream-K schedule of decode in the workspace. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

namespace attune::kernels {

constexpr int kKeysOfWarp = 16;  // keys of a tile that one warp takes

// A sequence by the lengths on the device: its queries, the keys that they may see, and the tiles that hold those.
struct Sequence {
  long long q_begin;  // first row of q; 0 where rows count from the sequence's own
  int num_q;
  int num_keys;               // cached and new
  int first_key, end_key;     // cached keys that some query may see
  int first_tile, num_tiles;  // the tiles of those keys; one, which is empty, where there are none
  int row_blocks;             // blocks of packed rows; 0: there is no work
  int num_new;                // tokens beside the cache, the last of num_keys; 0 where there is no work
};

// A run of key tiles of one output tile, which is a (sequence, KV head, row block).
struct Split {
  int batch, head;
  int row_begin, num_rows;   // packed rows of the sequence: query-major, the heads of a KV head inside
  int first_tile, end_tile;  // counted from key 0
  int is_first, is_last;     // the split holds the first, the last tile of its output tile
  long long output_tile_begin, output_tile_end;  // stream-K tiles of the whole output tile
};

// The stream-K range of a block, and the walk over it. The schedule kernel sets it to its first split.
struct alignas(16) StreamKRange {
  long long total_tiles;  // of the call
  long long next_tile, tiles_left, tile_in_sequence;
  int batch;
  int live;        // there is a split
  int blocks;      // ranges that the tiles are cut into, at most
  unsigned stamp;  // common/stamp.cuh
  Sequence sequence;
  Split split;
};

}  // namespace attune::kernels
