// SPDX-License-Identifier: Apache-2.0
// Configuration and shared memory of the selection; its prefix sums and histograms.
#pragma once

#include "indexer/rows.cuh"
#include "ptx/cluster.cuh"

namespace attune::indexer {

struct Config {
  static constexpr int kThreads = ATTUNE_THREADS, kWarps = kThreads / 32;
  static constexpr int kCluster = ATTUNE_CLUSTER;                // blocks of a row
  static constexpr int kBits = ATTUNE_BITS, kBins = 1 << kBits;  // of a digit of a rank
  static constexpr int kCandidates = ATTUNE_CANDIDATES;
  static constexpr int kMarkWords = ATTUNE_MARK_WORDS, kSpan = 32 * kMarkWords;  // keys that can be marked at a time
  static constexpr int kBlocksPerSm = ATTUNE_BLOCKS_PER_SM;
  static constexpr int kVectors = ATTUNE_VECTORS;  // vectors of four keys that a thread reads at a time
  // keys of one vector of all threads; of all vectors
  static constexpr int kLine = 4 * kThreads, kChunk = kVectors * kLine;

  static constexpr int kDigits = 3;
  // The number of bits below digit d.
  __device__ static constexpr int shift(int d) { return d == 0 ? 32 - kBits : d == 1 ? 32 - 2 * kBits : 0; }

  static_assert(kThreads % 32 == 0 && kWarps <= 32, "one warp scans the sums of all warps");
  static_assert(kWarps % kCluster == 0, "each warp gathers from one block");
  static_assert(kBins % (kThreads * kCluster) == 0 || kBins % kThreads == 0, "bins divide evenly");
  static_assert(kBits >= 10 && 3 * kBits >= 32 && 2 * kBits < 32, "three digits; bin 0 of the first one is empty");
  static_assert(kSpan % kLine == 0, "a span has whole lines");
};

// The number of keys above a range of ranks, and inside it.
struct Counts {
  unsigned above, inside;
};
__device__ __forceinline__ Counts operator+(Counts a, Counts b) { return {a.above + b.above, a.inside + b.inside}; }
__device__ __forceinline__ Counts operator-(Counts a, Counts b) { return {a.above - b.above, a.inside - b.inside}; }

// Shared memory of the search for T.
struct Search {
  unsigned histogram[Config::kBins + 32];                             // of this block's keys; a spare bin for each lane
  unsigned of_all[Config::kCluster > 1 ? Config::kBins : 1];          // histogram of the row
  unsigned rank[Config::kCandidates];                                 // of this block's candidates, in any order
  int key[Config::kCandidates];                                       // the keys of these ranks
  unsigned gathered[Config::kCluster > 1 ? Config::kCandidates : 1];  // ranks of the candidates of all blocks
};

struct SharedStorage {
  static constexpr int kStaged = sizeof(Search) / 4;
  union {
    Search search;
    int staged[kStaged];  // positions that are written out, afterwards
  };
  // Bit masks, a bit for each key: its rank is above the range of T; inside it.
  unsigned above[Config::kMarkWords], inside[Config::kMarkWords];
  Counts warp_sum[Config::kWarps];
  Counts block_sum;                // of this block, read by the others of the cluster
  int bin, bin_above, bin_inside;  // the bin of the wanted rank; how many keys are above it, and in it
  int candidates;
};
static_assert(sizeof(SharedStorage) <= ATTUNE_SHARED_BYTES, "the host asks for less shared memory than this");

__device__ __forceinline__ Counts inclusive_sum_of_warp(Counts x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Counts other = {__shfl_up_sync(0xffffffffu, x.above, step), __shfl_up_sync(0xffffffffu, x.inside, step)};
    if (static_cast<int>(threadIdx.x % 32) >= step) x = x + other;
  }
  return x;
}
__device__ __forceinline__ Counts of_lane(Counts x, int lane) {
  return {__shfl_sync(0xffffffffu, x.above, lane), __shfl_sync(0xffffffffu, x.inside, lane)};
}

// The sum over the threads before this one; all: over all threads. A barrier must lie between two calls.
__device__ __forceinline__ Counts exclusive_sum(Counts x, SharedStorage& shared, Counts& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Counts upto = inclusive_sum_of_warp(x);
  if (lane == 31) shared.warp_sum[warp] = upto;
  __syncthreads();
  const Counts warps = inclusive_sum_of_warp(lane < Config::kWarps ? shared.warp_sum[lane] : Counts{});
  all = of_lane(warps, Config::kWarps - 1);
  const Counts before = of_lane(warps, warp > 0 ? warp - 1 : 0);
  return upto - x + (warp > 0 ? before : Counts{});
}

// Sets shared.bin to the bin of the wanted-th largest key, or 0 if fewer keys were counted. Ends with a block barrier.
__device__ __forceinline__ void find_bin(const unsigned* histogram, unsigned wanted, SharedStorage& shared) {
  constexpr int kOfThread = Config::kBins / Config::kThreads;
  const int first = Config::kBins - (static_cast<int>(threadIdx.x) + 1) * kOfThread;  // the first thread has the top
  unsigned bins[kOfThread], mine = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) bins[i] = histogram[first + i];
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) mine += bins[i];
  Counts all;
  unsigned before = exclusive_sum({mine, 0}, shared, all).above;
  if (threadIdx.x == 0 && all.above < wanted) shared.bin = 0, shared.bin_above = all.above, shared.bin_inside = 0;
  if (before < wanted && wanted <= before + mine) {
#pragma unroll
    for (int i = kOfThread - 1; i >= 0; --i) {
      if (before < wanted && wanted <= before + bins[i]) {
        shared.bin = first + i;
        shared.bin_above = static_cast<int>(before);
        shared.bin_inside = static_cast<int>(bins[i]);
      }
      before += bins[i];
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void clear_histogram(SharedStorage& shared) {
  for (int i = threadIdx.x; i < Config::kBins; i += Config::kThreads) shared.search.histogram[i] = 0;
  __syncthreads();
}

// Completes a histogram and returns that of the whole row. Each block of a cluster sums a slice of the bins over all
// blocks and stores the sums in all of them (DSMEM).
__device__ __forceinline__ const unsigned* whole_histogram(SharedStorage& shared) {
  if constexpr (Config::kCluster == 1) {
    __syncthreads();
    return shared.search.histogram;
  } else {
    constexpr int kSlice = Config::kBins / Config::kCluster;
    const int rank = ptx::cluster_rank();
    ptx::cluster_barrier();
    for (int i = threadIdx.x; i < kSlice; i += Config::kThreads) {
      const int bin = rank * kSlice + i;
      unsigned sum = 0;
#pragma unroll
      for (int b = 0; b < Config::kCluster; ++b)
        sum += ptx::in_block(shared.search.histogram, (rank + b) % Config::kCluster)[bin];
#pragma unroll
      for (int b = 0; b < Config::kCluster; ++b)
        ptx::in_block(shared.search.of_all, (rank + b) % Config::kCluster)[bin] = sum;
    }
    ptx::cluster_barrier();
    return shared.search.of_all;
  }
}

// The sum over the blocks of the cluster before this one; all: over all blocks.
__device__ __forceinline__ Counts exclusive_sum_of_blocks(Counts x, SharedStorage& shared, Counts& all) {
  all = x;
  if constexpr (Config::kCluster == 1) return {};
  const int lane = threadIdx.x % 32, rank = ptx::cluster_rank();
  if (threadIdx.x == 0) shared.block_sum = x;
  ptx::cluster_barrier();
  const Counts upto =
      inclusive_sum_of_warp(lane < Config::kCluster ? *ptx::in_block(&shared.block_sum, lane) : Counts{});
  ptx::cluster_barrier();  // all blocks have read: the next row may begin, or the block may end
  all = of_lane(upto, Config::kCluster - 1);
  return of_lane(upto, rank) - x;
}

}  // namespace attune::indexer
