// SPDX-License-Identifier: Apache-2.0
// The loop over work tiles of the producers of the M = 64 kernel. Their first warp also fetches the work tiles from the
// tile scheduler and issues the copies of q.
#pragma once

#include "mla/config.cuh"
#include "ptx/grid.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::mla {

// The tensor maps of the queries' latent channels and of their rope channels.
struct QueryMaps {
  const ptx::TensorMap &latent, &rope;
};

// Issues the TMA copies of a work tile's q, one box for each 64 channels. Called by all lanes of a warp.
__device__ __forceinline__ void load_q(const WorkTileParams& p, const Smem& smem, const QueryMaps& maps,
                                       const WorkTile& work, int head_tile) {
  if (ptx::elect()) {
    ptx::arrive_expecting(smem.q_full(), Config::kChunks * 128 * p.heads_of_tile * p.tokens_of_tile);
    const int row = static_cast<int>(work.q_row) + work.token_begin, batch = p.q_flat ? 0 : work.batch;
    const int head = head_tile * p.heads_of_tile;
#pragma unroll 1
    for (int i = 0; i < Config::kChunksV; ++i)
      ptx::tma_load(smem.q() + i * Config::kChunkBytes, maps.latent, smem.q_full(), 64 * i, head, row, batch);
    if constexpr (Config::kChunks > Config::kChunksV)
      ptx::tma_load(smem.q() + Config::kChunksV * Config::kChunkBytes, maps.rope, smem.q_full(), 0, head, row, batch);
  }
  __syncwarp();
}

// A producer warp's loop over the work tiles, for all its lanes. The first warp fetches the work tiles for all warps:
// the first one by fetch_first(), each next one by fetch_next(), once a work tile and after load_next_q().
class WorkTileReader {
 public:
  __device__ __forceinline__ WorkTileReader(const WorkTileParams& p, const Smem& smem, const QueryMaps& q)
      : p_(p), smem_(smem), q_(q), scheduler_(p, smem) {}

  using Scheduler = scheduler::TileScheduler<Smem, Config::kCluster, false, true>;

  // Waits for the previous kernels first.
  __device__ __forceinline__ void fetch_first(const Scheduler::Prefetched& first) {
    if (is_scheduler_warp()) {
      scheduler_.first(first);
    } else if (!kOwnCount) {
      scheduler_.pass();
    }
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (is_scheduler_warp()) scheduler_.prefetch_next_tile_idx();
  }
  __device__ __forceinline__ void fetch_next() {
    if (is_scheduler_warp()) {
      scheduler_.next();
    } else if (!kOwnCount) {
      scheduler_.pass();
    }
  }
  // Whether there is another work tile. Waits until it has been fetched.
  __device__ __forceinline__ bool has_work() const {
    ptx::wait_phase(smem_.work_full(slot_of_work(before())), before() / kernels::kWorkSlots % 2);
    return head_tile() != scheduler::kNoMoreWork;
  }
  // Valid until the next one is fetched.
  __device__ __forceinline__ const WorkTile& work() const { return smem_.work(slot_of_work(before())); }
  __device__ __forceinline__ int head_tile() const { return smem_.head_tile(slot_of_work(before())); }
  // Issues the copies of the current work tile's q, once the previous q is released. A consumer warp, which has nothing
  // else to do yet, loads q of the first work tile (load_first_q).
  __device__ __forceinline__ void load_next_q() const {
    if (!is_scheduler_warp() || before() == 0) return;
    ptx::wait_phase(smem_.q_empty(), (before() + 1) % 2);
    load_q(p_, smem_, q_, work(), head_tile());
  }
  // Ends the current work tile, after the next one has been fetched.
  __device__ __forceinline__ void advance() {
    __syncwarp();
    if constexpr (kOwnCount) count_ = ptx::opaque(count_);  // recomputes the slot, rather than keep it in a register
    const unsigned present = kOwnCount ? count_ : ptx::opaque(scheduler_.count()) - 2;
    if (!is_scheduler_warp() && threadIdx.x % 32 == 0) ptx::arrive(smem_.work_empty(slot_of_work(present)));
    if constexpr (kOwnCount) ++count_;
  }

 private:
  // Whether this class counts work tiles beside the scheduler, whose count is one ahead in the first warp. With one
  // count dequant producers spill in the loop over tiles; with two counts the others spill.
  static constexpr bool kOwnCount = Config::kDequant;
  __device__ __forceinline__ static bool is_scheduler_warp() { return threadIdx.x < 32; }
  __device__ __forceinline__ unsigned before() const { return kOwnCount ? count_ : scheduler_.count() - 1; }

  const WorkTileParams& p_;
  const Smem& smem_;
  const QueryMaps q_;
  Scheduler scheduler_;
  unsigned count_ = 0;  // work tiles before the current one
};

// The cached keys [begin, end) that all rows of the M block see.
struct KeyRange {
  int begin, end;
};
__device__ __forceinline__ KeyRange cached_keys_of_all_rows(const WorkTileParams& p, const WorkTile& t) {
  if (KeyMask::kAny) return {0, 0};
  const int position = t.num_keys - t.num_q + t.token_begin;
  return {max(t.first_key, scheduler::first_visible(p, position + t.num_tokens - 1)),
          min(min(t.end_key, t.num_cached), scheduler::end_visible(p, t.num_keys, position))};
}
// Whether the rows of the M block see different keys of a tile.
__device__ __forceinline__ bool needs_row_mask(const WorkTileParams& p, const WorkTile& t, const Tile& tile) {
  if (KeyMask::kAny) return true;
  const int position = t.num_keys - t.num_q + t.token_begin;
  return tile.start < scheduler::first_visible(p, position + t.num_tokens - 1) ||
         tile.high > scheduler::end_visible(p, t.num_keys, position);
}

}  // namespace attune::mla
