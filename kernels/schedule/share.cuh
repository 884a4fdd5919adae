// SPDX-License-Identifier: Apache-2.0
// How the line of tiles is dealt to the blocks of the decode grid. Pure arithmetic: any block can tell which block has which tile.
#pragma once

#include "schedule/sequence.cuh"

namespace attune::schedule {

using kernels::Share;

// 64-bit division is a hundred instructions; what fits 32 bits is the rule.
__device__ __forceinline__ long long divide(long long a, int b) {
  if ((a >> 32) == 0) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
  return a / b;
}

// A run of blocks that share a run of tiles evenly: the first `more` blocks have one tile more than the others.
struct Wave {
  long long first_tile, each, more;
  int first_block, blocks;

  __device__ __forceinline__ Wave(long long first_tile, long long tiles, int first_block, int blocks)
      : first_tile(first_tile), each(divide(tiles, blocks)), more(tiles - each * blocks), first_block(first_block), blocks(blocks) {}

  __device__ __forceinline__ long long tile_of_block(int c) const {
    const int i = c - first_block;
    return first_tile + i * each + min(static_cast<long long>(i), more);
  }
  __device__ __forceinline__ long long count_of_block(int c) const { return each + (c - first_block < more ? 1 : 0); }
  __device__ __forceinline__ int block_of_tile(long long tile) const {
    const long long at = tile - first_tile, thick = more * (each + 1);
    const long long i = at < thick ? divide(at, static_cast<int>(each + 1)) : more + divide(at - thick, static_cast<int>(each));
    return first_block + static_cast<int>(i);
  }
};

// Fewer tiles than this are dealt in one wave.
__device__ __forceinline__ bool in_one_wave(const DecodeParams& p, long long total) {
  return total < static_cast<long long>(p.slots) * p.guided_from;
}
__device__ __forceinline__ long long wave_begin(const DecodeParams& p, long long total, int wave) {
  return wave == 0 ? 0 : total * p.wave_end[wave - 1] >> 10;
}
__device__ __forceinline__ Wave make_wave(const DecodeParams& p, long long total, int wave) {
  if (in_one_wave(p, total)) return {0, total, 0, static_cast<int>(min(total, static_cast<long long>(p.slots)))};
  const long long begin = wave_begin(p, total, wave);
  return {begin, wave_begin(p, total, wave + 1) - begin, wave * p.slots, p.slots};
}

__device__ __forceinline__ Wave wave_of_block(const DecodeParams& p, long long total, int c) {
  int wave = 0;
  while (c >= p.slots * (wave + 1)) ++wave;
  return make_wave(p, total, wave);
}
// Blocks that have tiles; they are the first ones, so the parts of a pair lie in consecutive blocks. Every one has at least one tile:
// the host sees to it that no wave is too thin.
__device__ __forceinline__ int busy_blocks(const DecodeParams& p, long long total) {
  return in_one_wave(p, total) ? static_cast<int>(min(total, static_cast<long long>(p.slots))) : p.slots * p.waves;
}
// Block that holds a tile.
__device__ __forceinline__ int block_of(const DecodeParams& p, long long total, long long tile) {
  int wave = 0;
  if (!in_one_wave(p, total)) {
    while (tile >= wave_begin(p, total, wave + 1)) ++wave;
  }
  return make_wave(p, total, wave).block_of_tile(tile);
}

}  // namespace attune::schedule
