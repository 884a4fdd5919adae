// SPDX-License-Identifier: Apache-2.0
// The tile scheduler of the scores kernel: a warp finds the work tiles of its block, in order.
//
// A tile_idx numbers (row tile, key block) pairs: tile_rows rows of the launch, of any sequences, against keys [block *
// kKeys, ..) of their sequences. Block x of the persistent grid takes x, x + gridDim, ..: neighbouring blocks have
// neighbouring keys of the same rows, so rows with few keys, as the first ones of a causal prompt, load all blocks
// evenly. Lengths are known on the device alone, so many tiles may be empty; the lanes test 32 tiles at a time. A tile
// has one work tile for each of its sequences.
#pragma once

#include "indexer/scores_config.cuh"

namespace attune::indexer {

class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const IndexScoresParams& p) : p_(p), base_(blockIdx.x) {}

  // Finds the next work tile, the same in all lanes of the warp. Returns false at the end of work.
  __device__ __forceinline__ bool next(WorkTile& work) {
    for (;;) {
      while (row_ < row_end_) {
        if (next_of_tile(work)) return true;
      }
      if (found_ == 0) {
        if (base_ >= p_.num_tiles) return false;
        const long long tile_idx = base_ + lane() * static_cast<long long>(gridDim.x);
        found_ = __ballot_sync(0xffffffffu, tile_idx < p_.num_tiles && may_have_work(tile_idx));
        found_base_ = base_;
        base_ += 32 * static_cast<long long>(gridDim.x);
        continue;
      }
      const int bit = __ffs(static_cast<int>(found_)) - 1;
      found_ &= found_ - 1;
      start_tile(found_base_ + bit * static_cast<long long>(gridDim.x), row_, row_end_, key_);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }

  __device__ __forceinline__ void start_tile(long long tile_idx, long long& row, long long& row_end, int& key) const {
    const long long row_tile = divide(tile_idx, p_.by_key_blocks);
    key = static_cast<int>(tile_idx - row_tile * p_.key_blocks) * Config::kKeys;
    row = p_.rows.first + row_tile * p_.tile_rows;
    row_end = min(row + p_.tile_rows, p_.rows.first + p_.rows.count);
  }

  // A cheap test, because the last row sees the last key.
  __device__ __forceinline__ bool may_have_work(long long tile_idx) const {
    long long row, row_end;
    int key;
    start_tile(tile_idx, row, row_end, key);
    if (p_.clear) return true;
    const Owner first = owner_of(p_.rows, row), last = owner_of(p_.rows, row_end - 1);
    if (first.sequence != last.sequence) return true;
    if (first.sequence < 0) return p_.rows.owners != nullptr && row_end - row > 1;
    const int s = num_keys(p_.rows, last.sequence);
    return key < (p_.rows.causal ? clamp_int(static_cast<long long>(s) - last.n + last.i + 1, 0, s) : s);
  }

  // The work tile of the tile's next sequence. Returns false if none of its rows needs these keys.
  __device__ __forceinline__ bool next_of_tile(WorkTile& work) {
    const Owner owner = owner_of(p_.rows, row_);
    if (owner.sequence < 0) {
      ++row_;
      return false;
    }
    const long long end = min(row_end_, row_ + (owner.n - owner.i)), row = row_ + lane();
    const int s = num_keys(p_.rows, owner.sequence);
    bool needed = false;
    if (row < end) {
      const KeyRange r = visible(p_.rows, row, owner.i + lane(), owner.n, s);
      const bool scored = max(r.begin, key_) < min(r.end, key_ + Config::kKeys) && r.end - r.begin > p_.most_kept;
      needed = scored || (p_.clear && key_ < p_.num_columns);
    }
    work = {row_, owner.i, owner.n, owner.sequence, s, key_, __ballot_sync(0xffffffffu, needed)};
    row_ = end;
    return work.mask != 0;
  }

  const IndexScoresParams& p_;
  long long base_, found_base_ = 0;  // tile_idx
  unsigned found_ = 0;               // bits: tiles from found_base_ on that may have work
  long long row_ = 0, row_end_ = 0;  // the rows of the tile that are left
  int key_ = 0;
};

}  // namespace attune::indexer
