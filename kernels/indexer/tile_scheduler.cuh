// SPDX-License-Identifier: Apache-2.0
// The tile scheduler: a warp finds the work tiles of its block, in order.
//
// Item (tile, key block) is tile_rows rows of the launch, of any sequences, against keys [block * kKeys, ..) of their
// sequences. Block x of the persistent grid takes items x, x + gridDim, ..: neighbouring blocks have neighbouring keys
// of the same rows, so that rows with few keys, as the first ones of a causal prompt, load all blocks alike. Only the
// device knows lengths, so many items may be empty; each lane looks at one, 32 at a time.
#pragma once

#include "indexer/scores_config.cuh"

namespace attune::indexer {

class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const IndexScoresParams& p) : p_(p), base_(blockIdx.x) {}

  // The next work tile, the same in all lanes of the warp. False: end of work.
  __device__ __forceinline__ bool next(WorkTile& work) {
    for (;;) {
      while (row_ < row_end_) {
        if (next_of_item(work)) return true;
      }
      if (found_ == 0) {
        if (base_ >= p_.items) return false;
        const long long item = base_ + lane() * static_cast<long long>(gridDim.x);
        found_ = __ballot_sync(0xffffffffu, item < p_.items && may_have_work(item));
        found_base_ = base_;
        base_ += 32 * static_cast<long long>(gridDim.x);
        continue;
      }
      const int bit = __ffs(static_cast<int>(found_)) - 1;
      found_ &= found_ - 1;
      start_item(found_base_ + bit * static_cast<long long>(gridDim.x), row_, row_end_, key_);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }

  __device__ __forceinline__ void start_item(long long item, long long& row, long long& row_end, int& key) const {
    const long long tile = divide(item, p_.by_key_blocks);
    key = static_cast<int>(item - tile * p_.key_blocks) * Config::kKeys;
    row = p_.rows.first + tile * p_.tile_rows;
    row_end = min(row + p_.tile_rows, p_.rows.first + p_.rows.count);
  }

  // A cheap test: the last row sees the last key.
  __device__ __forceinline__ bool may_have_work(long long item) const {
    long long row, row_end;
    int key;
    start_item(item, row, row_end, key);
    if (p_.clear) return true;
    const Owner first = owner_of(p_.rows, row), last = owner_of(p_.rows, row_end - 1);
    if (first.sequence != last.sequence) return true;
    if (first.sequence < 0) return p_.rows.owners != nullptr && row_end - row > 1;
    const int s = num_keys(p_.rows, last.sequence);
    return key < (p_.rows.causal ? clamp_int(static_cast<long long>(s) - last.n + last.i + 1, 0, s) : s);
  }

  // The work tile of the item's next sequence. False: none of its rows needs these keys.
  __device__ __forceinline__ bool next_of_item(WorkTile& work) {
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
  long long base_, found_base_ = 0;  // items
  unsigned found_ = 0;               // bits: items from found_base_ on that may have work
  long long row_ = 0, row_end_ = 0;  // rows left of the item
  int key_ = 0;
};

}  // namespace attune::indexer
