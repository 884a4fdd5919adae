// SPDX-License-Identifier: Apache-2.0
// How stream-K cuts the tiles of a call into ranges. This is pure arithmetic: every block computes which block has
// which tile.
#pragma once

#include "scheduler/stream_k_sequence.cuh"

namespace attune::scheduler {

// A 64-bit division takes a hundred instructions, and numerators nearly always fit 32 bits.
__device__ __forceinline__ long long divide(long long a, int b) {
  if ((a >> 32) == 0) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
  return a / b;
}

// Every block gets `each` tiles, and the first `more` blocks one more. If there are fewer tiles than blocks, the last
// blocks get none, so that the splits of an output tile always belong to consecutive blocks.
struct StreamKPartition {
  long long each, more;
  int blocks;  // with tiles

  __device__ __forceinline__ StreamKPartition(int most, long long total)
      : blocks(static_cast<int>(min(total, static_cast<long long>(most)))) {
    each = blocks > 0 ? divide(total, blocks) : 0;
    more = total - each * blocks;
  }
  __device__ __forceinline__ long long first_tile(int block) const {
    return block * each + min(static_cast<long long>(block), more);
  }
  __device__ __forceinline__ long long num_tiles(int block) const { return each + (block < more ? 1 : 0); }
  __device__ __forceinline__ int block_of(long long tile) const {
    const long long thick = more * (each + 1);
    if (tile < thick) return static_cast<int>(divide(tile, static_cast<int>(each + 1)));
    return static_cast<int>(more + divide(tile - thick, static_cast<int>(each)));
  }
};

}  // namespace attune::scheduler
