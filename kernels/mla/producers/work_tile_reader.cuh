// SPDX-License-Identifier: Apache-2.0
// What every loader does: it goes through the work tiles, and the first of its warps takes them from the list and has
// the queries copied.
#pragma once

#include "mla/config.cuh"
#include "ptx/grid.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::mla {

// Of a block's queries: one box a chunk. All lanes of a warp.
__device__ __forceinline__ void load_q(const PrefillParams& p, const Smem& smem, const ptx::TensorMap& map,
                                       const WorkTile& work, int head_tile) {
  if (ptx::elect()) {
    ptx::arrive_expecting(smem.q_full(), Config::kChunks * 128 * p.heads_of_tile * p.tokens_of_tile);
    const int row = static_cast<int>(work.q_row) + work.token_begin, batch = p.q_flat ? 0 : work.batch;
#pragma unroll 1
    for (int i = 0; i < Config::kChunks; ++i) {
      ptx::copy_box(smem.q() + i * Config::kChunkBytes, map, smem.q_full(), 64 * i, head_tile * p.heads_of_tile, row,
                    batch);
    }
  }
  __syncwarp();
}

// A loader warp's way through the work tiles: all lanes. The first warp takes them from the list for all others: the
// first by take_first(), the next by take(), once a work tile and behind copy_queries().
class WorkTileReader {
 public:
  __device__ __forceinline__ WorkTileReader(const PrefillParams& p, const Smem& smem, const ptx::TensorMap& q)
      : p_(p), smem_(smem), q_(q), scheduler_(p, smem) {}

  using Scheduler = prefill::TileScheduler<Smem, Config::kCluster, false, true>;

  // Waits for the kernels before this one.
  __device__ __forceinline__ void fetch_first(const Scheduler::First& first) {
    if (is_scheduler_warp()) {
      scheduler_.first(first);
    } else if (!kOwnCount) {
      scheduler_.pass();
    }
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (is_scheduler_warp()) scheduler_.look_ahead();
  }
  __device__ __forceinline__ void fetch_next() {
    if (is_scheduler_warp()) {
      scheduler_.next();
    } else if (!kOwnCount) {
      scheduler_.pass();
    }
  }
  // Whether there is a work tile to be loaded; waits until it has been taken.
  __device__ __forceinline__ bool has_work() const {
    ptx::wait_phase(smem_.work_full(slot_of_work(before())), before() / kernels::kWorkSlots % 2);
    return head_tile() != prefill::kNoMoreWork;
  }
  // Until the next one is taken.
  __device__ __forceinline__ const WorkTile& work() const { return smem_.work(slot_of_work(before())); }
  __device__ __forceinline__ int head_tile() const { return smem_.head_tile(slot_of_work(before())); }
  // Has the present work tile's queries copied, once those before are no longer needed. The first work tile's a math
  // warp has had copied, which has nothing else to do yet.
  __device__ __forceinline__ void load_next_q() const {
    if (!is_scheduler_warp() || before() == 0) return;
    ptx::wait_phase(smem_.q_empty(), (before() + 1) % 2);
    load_q(p_, smem_, q_, work(), head_tile());
  }
  // The present work tile has been loaded, and the next one taken.
  __device__ __forceinline__ void advance() {
    __syncwarp();
    if constexpr (kOwnCount) count_ = ptx::kept(count_);  // the slot is computed anew, rather than kept in a register
    const unsigned present = kOwnCount ? count_ : ptx::kept(scheduler_.count()) - 2;
    if (!is_scheduler_warp() && threadIdx.x % 32 == 0) ptx::arrive(smem_.work_empty(slot_of_work(present)));
    if constexpr (kOwnCount) ++count_;
  }

 private:
  // Of work tiles, beside the feed's, which the first warp has one ahead: with one count for both, loaders that decode
  // spill in the loop over tiles; with two the others spill.
  static constexpr bool kOwnCount = Config::kDequant;
  __device__ __forceinline__ static bool is_scheduler_warp() { return threadIdx.x < 32; }
  __device__ __forceinline__ unsigned before() const { return kOwnCount ? count_ : scheduler_.count() - 1; }

  const PrefillParams& p_;
  const Smem& smem_;
  const ptx::TensorMap& q_;
  Scheduler scheduler_;
  unsigned count_ = 0;  // work tiles before the present one
};

// Whether rows of the block see different keys of a tile.
__device__ __forceinline__ bool needs_row_mask(const PrefillParams& p, const WorkTile& t, const Tile& tile) {
  const int position = t.num_keys - t.num_q + t.token_begin;
  return tile.start < prefill::first_visible(p, position + t.num_tokens - 1) ||
         tile.high > prefill::end_visible(p, t.num_keys, position);
}

}  // namespace attune::mla
