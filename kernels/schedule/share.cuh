// SPDX-License-Identifier: Apache-2.0
// How the line of tiles is dealt to the blocks of the grid, and how a block finds its share of it.
#pragma once

#include "schedule/sequence.cuh"

namespace attune::schedule {

using kernels::Share;

// First tile of block c, of `total`. Grows with c; boundary(grid) is total.
__device__ __forceinline__ long long boundary(const DecodeParams& p, long long total, int c) {
  const int wave = c / p.slots, i = c - wave * p.slots;
  if (total < static_cast<long long>(p.slots) * p.guided_from) {
    return wave > 0 ? total : static_cast<long long>(static_cast<unsigned long long>(total) * i / p.slots);
  }
  if (wave >= p.waves) return total;
  const long long begin = wave == 0 ? 0 : p.wave_end[wave - 1], end = p.wave_end[wave];
  return static_cast<long long>(static_cast<unsigned long long>(total) * (begin * p.slots + (end - begin) * i) / (1024ull * p.slots));
}

// Block that holds a tile.
__device__ __forceinline__ int block_of(const DecodeParams& p, long long total, long long tile) {
  int low = 0, high = p.slots * p.waves - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (boundary(p, total, middle) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Sums of `value` over the threads before this one; total gets the sum over all. scan: one entry for each warp and one more.
template <int kThreads>
__device__ __forceinline__ long long exclusive_sum(long long value, long long* scan, long long& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  long long sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) scan[warp] = sum;
  __syncthreads();
  long long before = 0, all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) before = all;
    all += scan[w];
  }
  total = all;
  return before + sum - value;
}

// Calls found(c, share) once for each of the blocks [first_block, end_block), from some thread of this block. Every thread takes part.
template <int kThreads, int kTileKeys, int kBlockRows, class Found>
__device__ __forceinline__ void deal(const DecodeParams& p, int first_block, int end_block, long long* scan, Found&& found) {
  const int each = (p.batch + kThreads - 1) / kThreads;
  const int begin = min(p.batch, static_cast<int>(threadIdx.x) * each), end = min(p.batch, begin + each);
  long long mine = 0, total;
  for (int b = begin; b < end; ++b) mine += line_tiles(p, read_sequence<kTileKeys, kBlockRows>(p, b));
  long long at = exclusive_sum<kThreads>(mine, scan, total);
  const long long mine_end = at + mine;
  if (total == 0 || mine == 0) {
    if (total == 0 && threadIdx.x == 0) {
      for (int c = first_block; c < end_block; ++c) found(c, Share{0, 0, 0, 0, 0, 0});
    }
    return;
  }
  // Blocks whose first tile is among this thread's. Boundaries past the line belong to the thread that ends it.
  int c = first_block;
  if (end_block - first_block > 1 && at > 0) {
    c = block_of(p, total, at - 1);
    while (c < end_block && boundary(p, total, c) < at) ++c;
  }
  int b = begin;
  Sequence s = read_sequence<kTileKeys, kBlockRows>(p, b);
  long long units = line_tiles(p, s);
  for (; c < end_block; ++c) {
    const long long from = boundary(p, total, c);
    if (from < at && from < mine_end) continue;
    if (from >= mine_end) {
      if (mine_end < total) break;
      found(c, Share{total, 0, 0, total, 0, 0});
      continue;
    }
    while (from >= at + units) {
      at += units;
      s = read_sequence<kTileKeys, kBlockRows>(p, ++b);
      units = line_tiles(p, s);
    }
    found(c, Share{from, boundary(p, total, c + 1) - from, from - at, total, b, 0});
  }
}

}  // namespace attune::schedule
