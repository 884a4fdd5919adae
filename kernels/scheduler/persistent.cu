// SPDX-License-Identifier: Apache-2.0
// The schedule of prefill and MLA: lists the work tiles of a batch on the device from its lengths, longest first. Row
// blocks are split along the keys if there are too few of them to fill the grid, or if one alone would take longer than
// all others. If splits for one round would leave much of the grid idle, there are shorter splits for several rounds,
// or stream-K ranges (balanced.cuh).
//
//   row blocks of sequence b: ceil(num_q / tokens_of_tile);  cost of a row block: its tiles of keys;
//   C = all tiles times head tiles;  ideal = C / blocks of the grid, a lower bound for any schedule
//
// Grid: one thread block of 1,024 threads. Each thread sums the row blocks of consecutive sequences, and a scan numbers
// the row blocks of the batch. Then each thread finds the sequences of its row blocks by binary search. Work tiles are
// sorted by a counting sort. The order of tiles with equal cost differs between runs, but no result depends on it. One
// schedule serves every layer with the same lengths.
//
// If the host knows that all sequences are equal and unsplit, the index of a work tile follows from its row block. The
// last row blocks, which see most keys, come first. Such a list is computed before the previous kernels have ended.
//
// The code runs about once, so instruction fetches dominate its time: all passes are one loop, their common code
// appears once, and nothing is unrolled.
#include "common/stamp.cuh"
#include "ptx/grid.cuh"
#include "ptx/reduce.cuh"
#include "scheduler/balanced.cuh"
#include "scheduler/persistent_common.cuh"

namespace attune::scheduler {

constexpr int kKeys = ATTUNE_KEYS;
constexpr bool kSparse = ATTUNE_SPARSE != 0, kBalanced = ATTUNE_BALANCED != 0;
constexpr int kL2Bytes = 32 << 20;        // for keys
constexpr int kMostKeys = kL2Bytes / 32;  // a limit for each thread: a key has two rows of 16 bytes or more
static_assert(1ll * kMostKeys * kThreads < 1ll << 31, "keys of all threads are summed in 31 bits");

enum Pass { kSequences, kCosts, kCounts, kAssign };

__device__ __forceinline__ int num_splits_of(int cost, int split_size) {
  return static_cast<int>(static_cast<unsigned>(cost + split_size - 1) / static_cast<unsigned>(split_size));
}

// The most tiles of a split.
__device__ __forceinline__ int choose_split_size(const WorkTileParams& p, int num_blocks, long long total, int max_cost,
                                                 SharedStorage& shared) {
  const long long cost = total * p.num_head_tiles;
  const bool ideal_is_less = cost <= static_cast<long long>(max_cost - 1) * p.num_blocks;
  if (p.no_splits || max_cost <= p.whole_tiles || !ideal_is_less) return max_cost;
  if (cost >> 32 != 0) return max_cost;  // a sequence of more than 2^30 keys: avoids a 64-bit division
  const unsigned even_share = (static_cast<unsigned>(cost) - 1) / static_cast<unsigned>(p.num_blocks) + 1;
  const int ideal = max(static_cast<int>(even_share), p.fewest_tiles);
  if (num_blocks > kThreads || static_cast<long long>(num_blocks) * p.num_head_tiles >= p.num_blocks) return ideal;
  // There are few row blocks: searches for the shortest split size with which one round takes all splits. A larger size
  // never makes more splits, so the warps try every 32nd of 1,024 sizes, then those up to the first that fits.
  const int step = (max_cost - ideal + kThreads - 2) / (kThreads - 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int fit = kThreads - 1;
#pragma unroll 1
  for (int stride = kWarps; stride > 0; stride /= kWarps) {
    const int size = fit - stride * (kWarps - 1 - warp), split_size = ideal + size * step;
    int splits = 0;
#pragma unroll 1
    for (int i = lane; i < num_blocks; i += 32) splits += num_splits_of(shared.cost[i], split_size);
    splits = ptx::sum_of_warp(splits);
    if (lane == 0 && splits * p.num_head_tiles <= p.num_blocks) atomicMin(&shared.first_fit, size);
    __syncthreads();
    fit = shared.first_fit;
    __syncthreads();
  }
  const int at_once = min(ideal + fit * step, max_cost);
  if constexpr (kBalanced) return at_once;
  // The lengths differ so much that one round would leave the grid idle: shorter splits in several rounds, longest
  // first. Tries a split size of 2/3 of the ideal, then the ideal. Takes the first with which at most num_blocks splits
  // are longer than half of `aim`, and at most 2 num_blocks longer than a third of it. Otherwise there is one round.
  const int aim = at_once - at_once / 8 - 4;
  if (ideal + ideal / 4 >= aim) return at_once;
  const auto shorter = [&] { return max((2 * ideal + 2) / 3, p.fewest_tiles); };
  if (threadIdx.x == 0) shared.first_fit = 2;
  __syncthreads();
  if (warp < 2) {
    const int split_size = warp == 0 ? shorter() : ideal;
    int splits = 0, halves = 0, thirds = 0;
#pragma unroll 1
    for (int i = lane; i < num_blocks; i += 32) {
      const int cost = shared.cost[i], n = num_splits_of(cost, split_size), size = num_splits_of(cost, max(n, 1));
      splits += n, halves += 2 * size > aim ? n : 0, thirds += 3 * size > aim ? n : 0;
    }
    splits = ptx::sum_of_warp(splits), halves = ptx::sum_of_warp(halves), thirds = ptx::sum_of_warp(thirds);
    const int heads = p.num_head_tiles, twice = 2 * p.num_blocks;
    // the workspace has room for the splits
    const bool holds = splits <= p.max_work_tiles && splits * heads <= twice;
    if (lane == 0 && holds && halves * heads <= p.num_blocks && thirds * heads <= twice)
      atomicMin(&shared.first_fit, warp);
  }
  __syncthreads();
  if (shared.first_fit == 2) return at_once;
  return shared.first_fit == 0 ? shorter() : ideal;
}

__device__ __forceinline__ void finish_list(const WorkTileParams& p, int total_keys, int num_work_tiles,
                                            int num_split_tiles, unsigned stamp) {
  const long long bytes = max(static_cast<long long>(max(total_keys, 1)) * p.bytes_of_key, 1ll);
  const unsigned fit = static_cast<unsigned>(kL2Bytes) / static_cast<unsigned>(min(bytes, 1ll * kL2Bytes));
  p.list->num_work_tiles = min(num_work_tiles, p.max_work_tiles);
  p.list->heads_at_a_time = min(static_cast<int>(fit), p.num_head_tiles);
  p.list->next_tile = 0;
  p.list->num_split_tiles = num_split_tiles;
  p.list->seen = p.list->decode_begun = p.list->prefill_ended = p.list->blocks_done = 0;
  p.list->stamp = stamp;
}

// Lists row blocks of lengths that the host knows.
__device__ __forceinline__ void list_uniform(const WorkTileParams& p) {
  __shared__ unsigned stamp;
  const int num_work_tiles = p.blocks_each * p.batch, thread = static_cast<int>(threadIdx.x);
  if (thread == 0) stamp = 0;
  __syncthreads();
  common::add_stamps<kSparse>(p, thread, kThreads, &stamp);
  __syncthreads();
#pragma unroll 1
  for (int i = thread;; i += kThreads) {
    const int from_last = static_cast<int>(static_cast<unsigned>(i) / static_cast<unsigned>(p.batch));
    const int b = i - from_last * p.batch;
    SequenceInfo s{};
    s.q_row = p.q_flat ? static_cast<long long>(b) * p.fixed_q : 0;
    s.kv_row = p.kv_flat ? static_cast<long long>(b) * p.fixed_kv : 0;
    s.num_q = p.fixed_q, s.num_keys = p.fixed_kv;
    WorkTile t = rows_of_block(p, s, b, p.blocks_each - 1 - from_last);
    take_all_tiles<kKeys>(t);
    if (i == thread) ptx::wait_for_previous_kernels();
    if (i >= num_work_tiles) break;
    p.work_tiles[i] = t;
  }
  const int keys = min(p.fixed_kv, kMostKeys);
  if (thread == 0) finish_list(p, static_cast<int>(min(1ll * keys * p.batch, 0x7fffffffll)), num_work_tiles, 0, stamp);
}

__device__ __forceinline__ void list_all(const WorkTileParams& p) {
  __shared__ SharedStorage shared;
  ptx::wait_for_previous_kernels();
  const int sequences_each = (p.batch + kThreads - 1) / kThreads, thread = static_cast<int>(threadIdx.x);
  if (thread == 0)
    shared.max_cost = 0, shared.first_fit = kThreads - 1, shared.num_split_tiles = 0, shared.num_splits = 0;
  if (thread == 0) shared.stamp = 0;
  shared.bucket[thread] = 0;
  __syncthreads();
  common::add_stamps<kSparse>(p, thread, kThreads, &shared.stamp);  // visible to all threads after the first sum

  // The items of a pass: this thread's sequences, then every 1,024th row block.
  int begin = min(p.batch, thread * sequences_each), end = min(p.batch, begin + sequences_each), step = 1;
  int total_keys = 0, num_blocks = 0, num_work_tiles = 0, split_size = 1, shift = 0;
  bool balances = false;
  const auto bucket_of = [&](int cost) { return &shared.bucket[kThreads - 1 - (cost >> shift)]; };  // longest first
#pragma unroll 1
  for (int pass = kSequences;; ++pass) {
    long long sum = 0, before;
    int keys = 0, longest = 0;
#pragma unroll 1
    for (int i = begin; i < end; i += step) {
      WorkTile t{};
      if (pass == kCounts && i < kThreads) {  // needs nothing but the cost
        t.tile_end = shared.cost[i];
      } else {
        SequenceOfBlock at{i, 0};
        if (pass != kSequences) at = find_sequence(p, sequences_each, shared, i);
        const SequenceInfo s = read_sequence<kSparse>(p, at.batch);
        if (pass == kSequences) {
          p.block_begin[i] = static_cast<int>(sum);  // counted from the thread's first sequence
          sum += s.row_blocks;
          keys = min(keys + min(s.num_keys, kMostKeys), kMostKeys);
          continue;
        }
        t = block_work<kKeys, kSparse>(p, s, at.batch, i - at.begin);
      }
      const int cost = t.tile_end;
      if (pass == kCosts) {
        if (i < kThreads) shared.cost[i] = cost;
        sum += cost;
        longest = max(longest, cost);
        continue;
      }
      // Splits of a row block have equal sizes, as far as possible: `longer` of them have one tile more.
      const int splits = num_splits_of(cost, split_size), size = cost / splits, longer = cost - size * splits;
      if (pass == kCounts) {
        atomicAdd(bucket_of(size), splits - longer);
        if (longer > 0) atomicAdd(bucket_of(size + 1), longer);
        continue;
      }
      set_splits(p, splits, shared, t);
      t.tile_end = 0;
#pragma unroll 1
      for (t.split_idx = 0; t.split_idx < splits; ++t.split_idx) {
        t.tile_begin = t.tile_end, t.tile_end += size + (t.split_idx < longer ? 1 : 0);
        const int work = atomicAdd(bucket_of(t.tile_end - t.tile_begin), 1);
        if (work < p.max_work_tiles) p.work_tiles[work] = t;
      }
    }
    if (pass == kSequences) sum |= static_cast<long long>(keys) << 32;
    if (pass == kCosts) {
      longest = static_cast<int>(ptx::max_of_warp(static_cast<unsigned>(longest)));
      if (thread % 32 == 0) atomicMax(&shared.max_cost, longest);
    }
    if (pass >= kCounts) {
      __syncthreads();
      if (pass == kAssign) break;
      sum = shared.bucket[thread];
    }
    const long long total = sum_of_block(sum, shared, before);
    if (pass == kSequences) {
      total_keys = static_cast<int>(total >> 32), num_blocks = static_cast<int>(total);
      shared.end[thread] = static_cast<int>(before) + static_cast<int>(sum);
      begin = thread, end = num_blocks, step = kThreads;
    } else if (pass == kCosts) {
      if (thread == 0) p.list->num_key_tiles = total * p.num_head_tiles;
      split_size = choose_split_size(p, num_blocks, total, shared.max_cost, shared);
      if constexpr (kBalanced) {
        const Balance balance = choose_balance(p, num_blocks, total, shared.max_cost, split_size);
        balances = balance == kStreamK;
        if (balances) break;
        if (balance == kWhole) split_size = shared.max_cost;
      }
#pragma unroll 1
      while (split_size >> shift >= kThreads) ++shift;
    } else {
      num_work_tiles = static_cast<int>(total);
      shared.bucket[thread] = static_cast<int>(before);
    }
    __syncthreads();
  }
  if constexpr (kBalanced) {
    if (balances) num_work_tiles = list_balanced<kKeys, kSparse>(p, sequences_each, num_blocks, shared);
  }
#pragma unroll 1
  for (int i = thread; i < shared.num_split_tiles * p.num_head_tiles; i += kThreads) p.splits_done[i] = 0;
  if (thread == 0) finish_list(p, total_keys, num_work_tiles, shared.num_split_tiles, shared.stamp);
}

}  // namespace attune::scheduler

extern "C" __global__ void __launch_bounds__(1024)
    attune_schedule_prefill(const __grid_constant__ attune::kernels::WorkTileParams p) {
  using namespace attune;
  if (p.blocks_each > 0) {
    scheduler::list_uniform(p);
  } else {
    scheduler::list_all(p);
  }
  // Dependent kernels start here and not earlier: a kernel reads its first work tile as soon as it starts
  // (tile_scheduler.cuh).
  ptx::fence_device();
  __syncthreads();
  ptx::allow_next_kernel();
}
