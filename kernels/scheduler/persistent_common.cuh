// SPDX-License-Identifier: Apache-2.0
// What the passes of the persistent schedule share: block-wide sums, the sequence of a row block, its splits.
#pragma once

#include "scheduler/scan.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::scheduler {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
static_assert(kWarps == 32, "a warp sums what the warps have summed");

struct alignas(16) SharedStorage {
  int end[kThreads];     // the row block after each thread's sequences
  int bucket[kThreads];  // work tiles of a cost, then the index of the next one; or sort keys of row blocks
  int cost[kThreads];    // of the first row blocks
  long long warp[kWarps];
  int max_cost, first_fit, num_split_tiles, num_splits;
  unsigned stamp;
};

// The sum over all threads; `before` is the sum over the threads before this one. Synchronise before the next call.
__device__ __forceinline__ long long sum_of_block(long long x, SharedStorage& shared, long long& before) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const long long inclusive = inclusive_sum_of_warp(x);
  if (lane == 31) shared.warp[warp] = inclusive;
  __syncthreads();
  const long long of_warp = shared.warp[lane], all = inclusive_sum_of_warp(of_warp);
  before = inclusive - x + __shfl_sync(0xffffffffu, all - of_warp, warp);
  return __shfl_sync(0xffffffffu, all, 31);
}

// The sequence of a row block, and the sequence's first row block.
struct SequenceOfBlock {
  int batch, begin;
};
__device__ __forceinline__ SequenceOfBlock find_sequence(const WorkTileParams& p, int sequences_each,
                                                         const SharedStorage& shared, int i) {
  int thread = 0;  // the first thread whose sequences end after i
#pragma unroll 1
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (shared.end[thread + step - 1] <= i) thread += step;
  }
  const int run_begin = thread == 0 ? 0 : shared.end[thread - 1];
  const int last = min(p.batch, (thread + 1) * sequences_each) - 1;
  SequenceOfBlock x{thread * sequences_each, run_begin};
#pragma unroll 1
  while (x.batch < last) {
    const int next = run_begin + p.block_begin[x.batch + 1];
    if (next > i) break;
    ++x.batch, x.begin = next;
  }
  return x;
}

// Reserves the splits of a row block.
__device__ __forceinline__ void set_splits(const WorkTileParams& p, int splits, SharedStorage& shared, WorkTile& t) {
  t.num_splits = splits;
  if (splits == 1) return;
  const int split = atomicAdd(&shared.num_split_tiles, 1);
  t.first_split = atomicAdd(&shared.num_splits, splits);
  if (p.split_tiles != nullptr) {
    p.split_tiles[split] = t;
  } else {
    t.split_tile = split;
  }
}

}  // namespace attune::scheduler
