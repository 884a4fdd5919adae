// SPDX-License-Identifier: Apache-2.0
// The tile scheduler of a persistent grid: one warp of each block takes work tiles from the list and passes them to the
// other warps through a ring of slots in shared memory.
#pragma once

#include "common/shared_view.cuh"
#include "common/work_tile_params.h"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "scheduler/tile_idx_ring.cuh"

namespace attune::scheduler {

constexpr int kNoMoreWork = -1;  // stored instead of a head tile

// Called by one thread of the grid after its wait for the previous kernels. Whoever acquires `seen` also sees the list.
// The release takes about as long as the load of the first keys.
__device__ __forceinline__ void release_list(const kernels::WorkTileParams& p) {
  if (p.split_tiles != nullptr) ptx::store_release(&p.list->seen, 1);
}

// Initialises the mbarriers of the slots. readers: warps that read work tiles.
template <class Smem>
__device__ __forceinline__ void init_work_barriers(const Smem& smem, int readers) {
  for (int i = 0; i < kernels::kWorkSlots; ++i) {
    ptx::init_barrier(smem.work_full(i), sizeof(kernels::WorkTile) / 16);
    ptx::init_barrier(smem.work_empty(i), readers);
  }
}

// The loop of a warp that reads work tiles. run(slot) computes one work tile.
template <class Smem, class Run>
__device__ __forceinline__ void run_work_tiles(const Smem& smem, const Run& run) {
  for (unsigned count = 0;; ++count) {
    const int slot = static_cast<int>(count % kernels::kWorkSlots);
    ptx::wait_phase(smem.work_full(slot), count / kernels::kWorkSlots % 2);
    if (smem.head_tile(slot) == kNoMoreWork) return;
    run(slot);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(smem.work_empty(slot));
  }
}

// kMixedBatch: in a mixed batch decode may still occupy multiprocessors, so some blocks start late. Then even the first
// work tile of a block comes from the counter, so that none is reserved for a block that has not started.
//
// A tile_idx numbers (work tile, head tile) pairs.
//
// Smem has work(slot), head_tile(slot), and the mbarriers work_full(slot), which takes kWorkVectors arrivals, and
// work_empty(slot).
//
// kCluster: all blocks of a cluster take the same work tile, each a different one of kCluster neighbouring head tiles,
// or with kRowPairs each half of its tokens. The first block takes tile indices and sends them to the other by DSMEM
// (tile_idx_ring.cuh), in order.
//
// kLowLatency: for calls so short that the latency of the first work tile matters. All head tiles of a work tile go
// together (bytes_of_key is 0). The list and the first work tile are read before the previous kernels have ended: the
// schedule kernel, which alone writes them, lets no other kernel start before it has. If one round takes all work, the
// counter is not used. Call first(), then prefetch_next_tile_idx() once the previous kernels have ended. A work tile
// may name the next one of its block (balanced.cuh).
template <class Smem, int kCluster = 1, bool kMixedBatch = false, bool kLowLatency = false, bool kRowPairs = false>
class TileScheduler {
  static_assert(!kMixedBatch || kCluster == 1, "a cluster's first tile does not come from the counter");
  static_assert(!kRowPairs || (kCluster == 2 && !kLowLatency), "two blocks have half of a work tile's tokens each");
  static constexpr int kHeadTiles = kRowPairs ? 1 : kCluster;  // of a cluster

 public:
  // The 16-byte vectors of a work tile, one for each lane.
  static constexpr int kWorkVectors = sizeof(kernels::WorkTile) / 16;

  __device__ __forceinline__ TileScheduler(const kernels::WorkTileParams& p, const Smem& smem)
      : p_(p), smem_(smem), lane_(threadIdx.x % 32), next_(blockIdx.x / kCluster) {}

  // The list header, and the lane's vector of the work tile that is probably the first.
  struct Prefetched {
    float4 list;
    uint4 vector;
  };
  __device__ __forceinline__ static int first_index(const kernels::WorkTileParams& p) {
    return min(static_cast<int>(blockIdx.x) / max(p.num_head_tiles, kCluster), p.max_work_tiles - 1);
  }
  __device__ __forceinline__ static Prefetched prefetch_first(const kernels::WorkTileParams& p) {
    Prefetched x{};
    if (threadIdx.x < kWorkVectors) x.vector = load_vector_of(p.work_tiles + first_index(p), threadIdx.x);
    if (threadIdx.x < 32) x.list = ptx::load_from_l2(reinterpret_cast<const float4*>(p.list));
    return x;
  }
  __device__ __forceinline__ void first(const Prefetched& asked) {
    const int head_tiles = p_.num_head_tiles / kCluster, tile_idx = static_cast<int>(next_);
    num_tiles_ = static_cast<int>(__float_as_uint(asked.list.x)) * head_tiles;
    if (tile_idx >= num_tiles_) {
      publish(nullptr, kNoMoreWork);
    } else {
      publish(nullptr, (tile_idx - first_index(p_) * head_tiles) * kCluster + rank(), true, asked.vector);
    }
  }
  __device__ __forceinline__ void prefetch_next_tile_idx() {
    if (kCluster == 1 && lane_ == 0) next_ = count_tile(num_tiles_);
  }

  // Called by all lanes of the warp, in a loop. Returns the slot of the next work tile, or -1, when the other warps
  // find kNoMoreWork. The work tile stays valid until its slot is needed again.
  __device__ __forceinline__ int next() {
    if constexpr (kLowLatency) return next_low_latency();
    const bool first = count_ == 0;
    const int heads_at_a_time = max(p_.list->heads_at_a_time / kHeadTiles, 1), num_work_tiles = p_.list->num_work_tiles;
    const int head_tiles = p_.num_head_tiles / kHeadTiles;
    const int num_tiles = num_work_tiles * head_tiles;  // the host refuses more than 2^31
    if (first && is_mixed_batch() && lane_ == 0) next_ = count_tile(num_tiles);
    const int tile_idx = next_tile_idx(num_tiles);
    if (tile_idx >= num_tiles) {
      publish(nullptr, kNoMoreWork);
      return -1;
    }
    // All work tiles of the first few head tiles come first, then those of the next few.
    const int section = tile_idx / (num_work_tiles * heads_at_a_time), first_head = section * heads_at_a_time;
    const int within = tile_idx - section * num_work_tiles * heads_at_a_time;
    const int heads = min(heads_at_a_time, head_tiles - first_head);
    if (lane_ == 0 && rank() == 0) {  // prefetches the index after this one
      next_ = count_tile(num_tiles);
      if constexpr (kCluster > 1) send_tile_idx(smem_, count_, static_cast<int>(next_));
    }
    const int work = within / heads;
    return publish(p_.work_tiles + work, (first_head + within % heads) * kHeadTiles + rank() % kHeadTiles);
  }

  // For a warp that only counts work tiles.
  __device__ __forceinline__ void pass() { ++count_; }
  __device__ __forceinline__ unsigned count() const { return count_; }

 private:
  // After first(): the next work tile is the one that the current one names, or comes from the counter. All heads go
  // together here; with the arithmetic of next() the producers of packed rows spill.
  __device__ __forceinline__ int next_low_latency() {
    const int current = static_cast<int>((count_ - 1) % kernels::kWorkSlots);
    int work = smem_.work(current).next_work, head_tile = smem_.head_tile(current);
    if (work == 0) {
      const int heads_at_a_time = max(p_.list->heads_at_a_time / kCluster, 1), num_work_tiles = p_.list->num_work_tiles;
      const int head_tiles = p_.num_head_tiles / kCluster, num_tiles = num_work_tiles * head_tiles;
      const int tile_idx = next_tile_idx(num_tiles);
      if (tile_idx >= num_tiles) return publish(nullptr, kNoMoreWork);
      const int section = tile_idx / (num_work_tiles * heads_at_a_time), first_head = section * heads_at_a_time;
      const int within = tile_idx - section * num_work_tiles * heads_at_a_time;
      const int heads = min(heads_at_a_time, head_tiles - first_head);
      if (kCluster == 1 && lane_ == 0) next_ = count_tile(num_tiles);  // prefetches the index after this one
      work = within / heads, head_tile = (first_head + within % heads) * kCluster + rank();
    }
    return publish(p_.work_tiles + work, head_tile);
  }

  __device__ __forceinline__ static int rank() { return static_cast<int>(blockIdx.x) % kCluster; }

  __device__ __forceinline__ bool is_mixed_batch() const { return kMixedBatch && p_.max_decode_q > 0; }

  // Whether every block has at most one tile, the one of its own index.
  __device__ __forceinline__ static bool has_one_round(int num_tiles) {
    return kLowLatency && num_tiles <= static_cast<int>(gridDim.x / kCluster);
  }
  // Takes the next index from the counter. The last arrival resets the counter to 0.
  __device__ __forceinline__ unsigned count_tile(int num_tiles) {
    if (has_one_round(num_tiles)) return num_tiles;
    // tiles that need no counter: one for each block or cluster
    const unsigned known = is_mixed_batch() ? 0 : gridDim.x / kCluster;
    return known + ptx::count_arrival(&p_.list->next_tile, num_tiles - 1 + (is_mixed_batch() ? gridDim.x : 0));
  }
  // In a cluster, the first block takes the index and sends it.
  __device__ __forceinline__ int next_tile_idx(int num_tiles) {
    if constexpr (kCluster == 1) {
      return __shfl_sync(0xffffffffu, static_cast<int>(next_), 0);
    } else if constexpr (!kLowLatency) {
      if (rank() != 0 && count_ > 0) return receive_tile_idx(smem_, count_ - 1);
      return __shfl_sync(0xffffffffu, static_cast<int>(next_), 0);
    } else {
      int tile_idx;
      if (has_one_round(num_tiles)) return num_tiles;
      if (rank() != 0) return receive_tile_idx(smem_, count_ - 1);
      if (lane_ == 0) {
        tile_idx = static_cast<int>(count_tile(num_tiles));
        send_tile_idx(smem_, count_ - 1, tile_idx);
      }
      return __shfl_sync(0xffffffffu, tile_idx, 0);
    }
  }

  __device__ __forceinline__ static uint4 load_vector_of(const kernels::WorkTile* from, unsigned i) {
    if (!kLowLatency) return reinterpret_cast<const uint4*>(from)[i];
    const float4 x = ptx::load_from_l2(reinterpret_cast<const float4*>(from) + i);
    return {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)};
  }
  // The lane's vector of a work tile.
  __device__ __forceinline__ uint4 load_vector(const kernels::WorkTile* from) const {
    return lane_ < kWorkVectors ? load_vector_of(from, lane_) : uint4{};
  }
  // Leaves this block its half of the tokens. The keys stay those that some row of either block sees.
  __device__ __forceinline__ void take_half_of_tokens(uint4& vector) const {
    static_assert(ATTUNE_OFFSET_OF(kernels::WorkTile, token_begin) == 28 &&
                  ATTUNE_OFFSET_OF(kernels::WorkTile, num_tokens) == 32);
    const int half = p_.tokens_of_tile / 2, tokens = static_cast<int>(vector.x);
    if (lane_ == 1 && rank() == 1) vector.w += half;
    if (lane_ == 2) vector.x = rank() == 0 ? min(tokens, half) : max(tokens - half, 0);
  }
  // loaded: `vector` is already the lane's vector of the work tile.
  __device__ __forceinline__ int publish(const kernels::WorkTile* from, int head_tile, bool loaded = false,
                                         uint4 vector = {}) {
    const int to = slot();
    if (from != nullptr && !loaded) vector = load_vector(from);
    if constexpr (kRowPairs) take_half_of_tokens(vector);
    ptx::wait_phase(smem_.work_empty(to), phase() ^ 1);
    __syncwarp();  // all lanes have seen the slot empty: after the arrivals below consumers may release it at once
    if (lane_ < kWorkVectors) {
      reinterpret_cast<uint4*>(&smem_.work(to))[lane_] = vector;
      if (lane_ == 0) smem_.head_tile(to) = head_tile;
      ptx::arrive(smem_.work_full(to));
    }
    __syncwarp();
    ++count_;
    return to;
  }

  // The slot of the next work tile, and the phase of its mbarriers.
  __device__ __forceinline__ int slot() const { return static_cast<int>(count_ % kernels::kWorkSlots); }
  __device__ __forceinline__ unsigned phase() const { return count_ / kernels::kWorkSlots % 2; }

  const kernels::WorkTileParams& p_;
  const Smem& smem_;
  const int lane_;
  unsigned next_;       // lane 0 only: the prefetched index
  int num_tiles_ = 0;   // set by first()
  unsigned count_ = 0;  // work tiles so far
};

}  // namespace attune::scheduler
