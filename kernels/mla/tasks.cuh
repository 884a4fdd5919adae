// SPDX-License-Identifier: Apache-2.0
// What every loader does: it goes through the tasks, and the first of its warps takes them from the list and has the
// queries copied.
#pragma once

#include "mla/config.cuh"
#include "ptx/grid.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::mla {

// Of a block's queries: one box a chunk. All lanes of a warp.
__device__ __forceinline__ void load_queries(const PrefillParams& p, const Places& places, const ptx::TensorMap& map,
                                             const Task& task, int head_tile) {
  if (ptx::elect()) {
    ptx::arrive_expecting(places.q_full(), Config::kChunks * 128 * p.heads_of_tile * p.tokens_of_tile);
    const int row = static_cast<int>(task.q_row) + task.token_begin, batch = p.q_flat ? 0 : task.batch;
#pragma unroll 1
    for (int i = 0; i < Config::kChunks; ++i) {
      ptx::copy_box(places.q() + i * Config::kChunkBytes, map, places.q_full(), 64 * i, head_tile * p.heads_of_tile,
                    row, batch);
    }
  }
  __syncwarp();
}

// A loader warp's way through the tasks: all lanes. The first warp takes them from the list for all others: the first
// by take_first(), the next by take(), once a task and behind copy_queries().
class TaskWalk {
 public:
  __device__ __forceinline__ TaskWalk(const PrefillParams& p, const Places& places, const ptx::TensorMap& q)
      : p_(p), places_(places), q_(q), feed_(p, places) {}

  using Feed = prefill::TaskFeed<Places, Config::kCluster, false, true>;

  // Waits for the kernels before this one.
  __device__ __forceinline__ void take_first(const Feed::First& asked) {
    if (leads()) {
      feed_.first(asked);
    } else if (!kOwnCount) {
      feed_.pass();
    }
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (leads()) feed_.look_ahead();
  }
  __device__ __forceinline__ void take() {
    if (leads()) {
      feed_.next();
    } else if (!kOwnCount) {
      feed_.pass();
    }
  }
  // Whether there is a task to be loaded; waits until it has been taken.
  __device__ __forceinline__ bool has_task() const {
    ptx::wait_phase(places_.task_full(slot_of_task(before())), before() / kernels::kTaskSlots % 2);
    return head_tile() != prefill::kNoMoreTasks;
  }
  // Until the next one is taken.
  __device__ __forceinline__ const Task& task() const { return places_.task(slot_of_task(before())); }
  __device__ __forceinline__ int head_tile() const { return places_.head_tile(slot_of_task(before())); }
  // Has the present task's queries copied, once those before are no longer needed. The first task's a math warp has had
  // copied, which has nothing else to do yet.
  __device__ __forceinline__ void copy_queries() const {
    if (!leads() || before() == 0) return;
    ptx::wait_phase(places_.q_empty(), (before() + 1) % 2);
    load_queries(p_, places_, q_, task(), head_tile());
  }
  // The present task has been loaded, and the next one taken.
  __device__ __forceinline__ void go_on() {
    __syncwarp();
    if constexpr (kOwnCount) count_ = ptx::kept(count_);  // the slot is computed anew, rather than kept in a register
    const unsigned present = kOwnCount ? count_ : ptx::kept(feed_.count()) - 2;
    if (!leads() && threadIdx.x % 32 == 0) ptx::arrive(places_.task_empty(slot_of_task(present)));
    if constexpr (kOwnCount) ++count_;
  }

 private:
  // Of tasks, beside the feed's, which the first warp has one ahead: with one count for both, loaders that decode spill
  // in the loop over tiles; with two the others spill.
  static constexpr bool kOwnCount = Config::kDecodes;
  __device__ __forceinline__ static bool leads() { return threadIdx.x < 32; }
  __device__ __forceinline__ unsigned before() const { return kOwnCount ? count_ : feed_.count() - 1; }

  const PrefillParams& p_;
  const Places& places_;
  const ptx::TensorMap& q_;
  Feed feed_;
  unsigned count_ = 0;  // tasks before the present one
};

// Whether rows of the block see different keys of a tile.
__device__ __forceinline__ bool is_edge(const PrefillParams& p, const Task& t, const Tile& tile) {
  const int position = t.num_keys - t.num_q + t.token_begin;
  return tile.start < prefill::first_visible(p, position + t.num_tokens - 1) ||
         tile.high > prefill::end_visible(p, t.num_keys, position);
}

}  // namespace attune::mla
