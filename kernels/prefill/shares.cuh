// SPDX-License-Identifier: Apache-2.0
// Shares of a batch: the tiles of all its blocks of rows form a line, which is cut into as many runs of the same length
// as blocks of the grid take tasks, wherever that is. Each gets one run, as a chain of tasks: so it has the same number
// of tiles as all others, whatever the lengths, for at most two parts a share that are to be merged.
//
//   line      block of rows 0            block of rows 1       ..
//             | kTaskTiles | its tiles   | kTaskTiles | its tiles
//   share k   [k step / 256, (k + 1) step / 256)
//
// What a task takes beside its tiles stands on the line before them. Where a share would begin with fewer than `fewest`
// tiles of a block, or behind all but as many, it begins with the next block, or with this one. Pure arithmetic.
#pragma once

#include "ptx/math.cuh"

namespace attune::prefill {

constexpr int kTaskTiles = 2;  // an estimate: outputs are stored, and the first products of the next task not hidden
constexpr int kMergeTiles = 4;  // likewise: parts are merged

struct Shares {
  int count = 0;       // 0: none, tasks go to whoever is free
  int fewest = 1;      // tiles of a part
  unsigned step = 0;   // in 256ths of a tile, so that shares differ by a tile at most

  // Whether shares are so long that each has a task.
  __device__ __forceinline__ bool suffice() const {
    return static_cast<int>(step / 256) > kTaskTiles + 2 * fewest;
  }
  __device__ __forceinline__ int begin(int share) const { return static_cast<int>(share * step / 256); }
  // The last one that begins at x or before.
  __device__ __forceinline__ int at(int x) const {
    return min(static_cast<int>((static_cast<unsigned>(max(x, 0)) * 256 + 255) / step), count - 1);
  }
  // Of a block of rows that begins at `from` of the line and has `tiles`: the shares that its first and its last part
  // belong to, and the tile at which the part of a later one than the first begins.
  __device__ __forceinline__ int first(int from) const { return at(from + kTaskTiles + fewest - 1); }
  __device__ __forceinline__ int last(int from, int tiles) const {
    return max(first(from), at(from + kTaskTiles + tiles - fewest));
  }
  __device__ __forceinline__ int tile(int share, int from) const { return begin(share) - from - kTaskTiles; }
};

// total: tiles of num_blocks blocks of rows, the longest of which has max_tiles; groups: blocks of the grid that take
// tasks, or clusters, a group for each share; cut: tiles that the longest part would have if parts went to whoever is
// free, or 0 if whole blocks would. Then blocks that are alike take whole rounds; of those that are not alike, the last
// ones leave others waiting, as each asks for its next task when it begins one: both by estimate.
__device__ __forceinline__ Shares choose_shares(long long total, int num_blocks, int max_tiles, int cut, int groups,
                                                int fewest) {
  constexpr long long kMost = 1 << 22;  // of the line, in 256ths within 31 bits
  const long long line = total + static_cast<long long>(kTaskTiles) * num_blocks;
  if (groups < 2 || num_blocks == 0 || line > kMost) return {};
  const auto n = static_cast<float>(num_blocks), each = static_cast<float>(total) / n, ideal = each * n / groups;
  auto time = static_cast<float>(cut);
  if (cut == 0) {
    const auto rounds = static_cast<float>((num_blocks + groups - 1) / groups), longest = static_cast<float>(max_tiles);
    time = fmaxf(fmaxf(longest, rounds * each), ideal + 2 * (longest - each) * groups / n);
  }
  Shares s;
  s.fewest = fewest;
  s.step = (static_cast<unsigned>(line) * 256 + groups - 1) / groups;
  if (time > ideal + ideal / 16 + kMergeTiles && s.suffice()) s.count = groups;
  return s;
}

}  // namespace attune::prefill
