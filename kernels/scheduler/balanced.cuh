// SPDX-License-Identifier: Apache-2.0
// A balanced schedule in the manner of stream-K: all groups of a grid get about the same number of tiles, whatever the
// lengths. A group has as many blocks as there are head tiles and takes a chain of work tiles (WorkTile::next_work).
//
// The target is the average number of tiles of a group. Row blocks are taken longest first:
//   1. Those longer than the target go to the stream, a sequence of tiles that is cut into ranges.
//   2. The others stay whole. Each group gets one in each round, in snake order: rounds alternate their direction.
//   3. Those left over after the last full round also go to the stream.
//   4. A group takes its whole row blocks, then the range of the stream that brings it to the target.
//
// A row block is split where a range ends, unless the split would have fewer than fewest_tiles. If whole row blocks
// alone come near the target, there is no stream and nothing is split. Splits must be stored and combined, so few row
// blocks are split: of 70 equal ones on 66 groups four are split and 66 stay whole.
//
// The overhead of a work tile counts as tiles. The schedule depends on nothing but the lengths, so splits are the same
// in each run.
#pragma once

#include "ptx/reduce.cuh"
#include "scheduler/persistent_common.cuh"

namespace attune::scheduler {

constexpr int kOverheadTiles = 2;  // of a work tile: an estimate
constexpr int kCombineTiles = 4;   // of combining a few row blocks: an estimate
constexpr int kMaxRowBlocks = kThreads, kMaxGroups = 256, kMaxTiles = 1 << 21;
static_assert(kMaxTiles <= 1 << (31 - 10) && kMaxRowBlocks == 1 << 10, "tiles and index of a row block share a word");

enum Balance { kUnchanged, kWhole, kStreamK };

// Returns kStreamK (list_balanced()), kWhole (no row block is split; they are taken dynamically) or kUnchanged (the
// splits that persistent.cu chose). split_size: the tiles of the longest of persistent.cu's splits.
__device__ __forceinline__ Balance choose_balance(const WorkTileParams& p, int num_blocks, long long total,
                                                  int max_cost, int split_size) {
  const bool splits_all = num_blocks * p.num_head_tiles < p.num_blocks;
  if (split_size <= kCombineTiles || p.no_splits || num_blocks > min(kMaxRowBlocks, p.max_work_tiles - p.num_blocks))
    return kUnchanged;
  const int groups = p.num_blocks / p.num_head_tiles;
  if (groups < 2 || groups > kMaxGroups || total > kMaxTiles) return kUnchanged;
  const auto tiles = static_cast<int>(total);
  const long long now =
      splits_all ? split_size : static_cast<long long>(max_cost) * ((num_blocks + groups - 1) / groups);
  // With fewer row blocks than groups all are split and combined.
  const int combine_cost = splits_all ? 2 + p.heads_of_tile * p.tokens_of_tile / 8 : kCombineTiles;
  if (16 * now * groups > 17 * tiles + 16 * combine_cost * groups) return kStreamK;
  return splits_all ? kUnchanged : kWhole;
}

struct BalanceState {
  int order[kMaxRowBlocks];  // row blocks, longest first
  int last[kMaxRowBlocks];   // of streamed row blocks: the range of their last split
  int begin[kMaxGroups];     // of ranges, in the stream
  int range[kMaxGroups];     // of a group, or -1
  int most;                  // tiles of the longest group where all blocks stay whole
  int sum;                   // of all threads
};

__device__ __forceinline__ int block_sum(int x, BalanceState& state) {
  __syncthreads();
  if (threadIdx.x == 0) state.sum = 0;
  __syncthreads();
  x = ptx::sum_of_warp(x);
  if (threadIdx.x % 32 == 0) atomicAdd(&state.sum, x);
  __syncthreads();
  return state.sum;
}

// The last range that begins at or before tile x of the stream.
__device__ __forceinline__ int range_at(const BalanceState& state, int num_ranges, int x) {
  int low = 0, high = num_ranges - 1;
#pragma unroll 1
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (state.begin[middle] <= x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Converts between a group and its position in a round; rounds alternate their direction.
__device__ __forceinline__ int snake_index(int round, int groups, int i) { return round % 2 == 0 ? i : groups - 1 - i; }

// The tiles of this thread's group in `rounds` rounds of row blocks, from the first-th row block in order.
__device__ __forceinline__ int group_load(const BalanceState& state, const SharedStorage& shared, int num_blocks,
                                          int groups, int first, int rounds) {
  const auto group = static_cast<int>(threadIdx.x);
  int load = 0;
  if (group >= groups) return 0;
#pragma unroll 1
  for (int k = 0; k < rounds; ++k) {
    const int i = first + k * groups + snake_index(k, groups, group);
    if (i < num_blocks) load += shared.cost[state.order[i]] + kOverheadTiles;
  }
  return load;
}

// Lists the work tiles: first the first one of each group. sequences_each: how many sequences each thread counted.
// Returns the number of groups with work.
template <int kKeys, bool kSparse>
__device__ __forceinline__ int list_balanced(const WorkTileParams& p, int sequences_each, int num_blocks,
                                             SharedStorage& shared) {
  __shared__ BalanceState state;
  const int thread = static_cast<int>(threadIdx.x), groups = p.num_blocks / p.num_head_tiles;
  const bool has = thread < num_blocks;
  // Longest first, ties by index: the sort key decreases along the order.
  const unsigned key = has ? shared.cost[thread] * kMaxRowBlocks + kMaxRowBlocks - 1 - thread : 0;
  shared.bucket[thread] = static_cast<int>(key);
  if (thread == 0) state.most = 0;
  __syncthreads();
  if (has) {
    int before = 0;
#pragma unroll 1
    for (int i = 0; i < num_blocks; i += 4) {
      const uint4 others = *reinterpret_cast<const uint4*>(&shared.bucket[i]);
      before +=
          (others.x > key ? 1 : 0) + (others.y > key ? 1 : 0) + (others.z > key ? 1 : 0) + (others.w > key ? 1 : 0);
    }
    state.order[before] = thread;
  }
  __syncthreads();
  // From here on each thread has the row block at its own position in the order.
  const int block = has ? state.order[thread] : 0, tiles = has ? shared.cost[block] : 0;
  int target = (block_sum(has ? tiles + kOverheadTiles : 0, state) + groups - 1) / groups;
  int rounds = (num_blocks + groups - 1) / groups, too_long = 0;
  int load = group_load(state, shared, num_blocks, groups, 0, rounds);
  atomicMax(&state.most, load);
  __syncthreads();
  if (state.most > target + target / 16 + kCombineTiles) {
    too_long = block_sum(has && tiles + kOverheadTiles > target ? 1 : 0, state);
    rounds = (num_blocks - too_long) / groups;
    load = group_load(state, shared, num_blocks, groups, too_long, rounds);
  }

  // The stream, and the ranges of it that bring each group to the target. The target is raised until all tiles of the
  // stream have a range. lacking: the tiles of this thread's range.
  const bool is_streamed = has && (thread < too_long || thread >= too_long + rounds * groups);
  const int number = thread < too_long ? thread : thread - rounds * groups;  // position in the stream
  const int num_streamed = max(num_blocks - rounds * groups, 0);
  long long before;
  const auto stream = static_cast<int>(sum_of_block(is_streamed ? tiles + kOverheadTiles : 0, shared, before));
  const int from = static_cast<int>(before), end = from + kOverheadTiles + tiles;
  int lacking = 0;
#pragma unroll 1
  while (stream > 0) {
    lacking = thread < groups ? target - load - kOverheadTiles : 0;
    if (lacking < kOverheadTiles + 2 * p.fewest_tiles) lacking = 0;
    const int all = block_sum(lacking, state);
    if (all >= stream) break;
    target += (stream - all) / groups + 1;
  }
  __syncthreads();
  const long long ranges = sum_of_block(lacking > 0 ? (1ll << 32) + lacking : 0, shared, before);
  const auto num_ranges = static_cast<int>(ranges >> 32);
  if (thread < groups) {
    state.range[thread] = lacking > 0 ? static_cast<int>(before >> 32) : -1;
    if (lacking > 0) state.begin[before >> 32] = static_cast<int>(before);
  }
  __syncthreads();
  int first = 0, last = 0;
  if (is_streamed) {
    first = range_at(state, num_ranges, from + kOverheadTiles + p.fewest_tiles - 1);
    last = max(first, range_at(state, num_ranges, end - p.fewest_tiles));
    state.last[number] = last;
  }
  __syncthreads();
  const bool follows = is_streamed && number > 0 && state.last[number - 1] == first;
  const bool is_followed = is_streamed && number + 1 < num_streamed &&
                           range_at(state, num_ranges, end + kOverheadTiles + p.fewest_tiles - 1) == last;
  // Ranges in use; the last ones may be empty.
  const int used = num_streamed > 0 ? state.last[num_streamed - 1] + 1 : 0;
  sum_of_block(follows ? 1 : 0, shared, before);

  // The order of the work tiles: whole row blocks by rounds; then the first work tile of each range; then the other
  // work tiles of the ranges. next_work links those of a group.
  const int num_whole_work_tiles = rounds * groups, others = num_whole_work_tiles + used + static_cast<int>(before);
  if (has) {
    const SequenceOfBlock at = find_sequence(p, sequences_each, shared, block);
    WorkTile t = block_work<kKeys, kSparse>(p, read_sequence<kSparse>(p, at.batch), at.batch, block - at.begin);
    set_splits(p, is_streamed ? last - first + 1 : 1, shared, t);
    t.tile_end = 0;
#pragma unroll 1
    for (; t.split_idx < t.num_splits; ++t.split_idx) {
      int work, next = 0;
      t.tile_begin = t.tile_end, t.tile_end = tiles;
      if (is_streamed) {
        const int own = first + t.split_idx;
        if (own < last) t.tile_end = state.begin[own + 1] - from - kOverheadTiles;
        work = t.split_idx == 0 && follows ? others : num_whole_work_tiles + own;
        if (own == last && is_followed) next = others + (follows ? 1 : 0);
      } else {
        const int whole = thread - too_long, round = whole / groups, group = snake_index(round, groups, whole % groups);
        const int after = (round + 1) * groups;
        work = round * groups + group;
        if (round + 1 < rounds && too_long + after + snake_index(round + 1, groups, group) < num_blocks) {
          next = after + group;
        } else if (num_streamed > 0 && state.range[group] >= 0 && state.range[group] < used) {
          next = num_whole_work_tiles + state.range[group];
        }
      }
      t.next_work = next;
      p.work_tiles[work] = t;
    }
  }
  __syncthreads();
  return rounds > 0 ? min(groups, num_blocks) : used;
}

}  // namespace attune::scheduler
