// SPDX-License-Identifier: Apache-2.0
// What every loader does: it goes through the tasks, and the first of its warps takes them from the list and has the
// queries copied.
#pragma once

#include "mla/config.cuh"
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

// load(task, head_tile, after_first) for each task; it calls after_first() once, when keys are under way. Then the next
// task is taken, so that nobody waits for it.
template <class Load>
__device__ __forceinline__ void for_all_tasks(const PrefillParams& p, const Places& places, const ptx::TensorMap& q,
                                              Load&& load) {
  prefill::TaskFeed<Places, Config::kCluster> feed(p, places);
  const bool leads = threadIdx.x < 32;
  if (leads) feed.next();
  for (unsigned count = 0;; ++count) {
    const int slot = slot_of_task(count);
    ptx::wait_phase(places.task_full(slot), count / kernels::kTaskSlots % 2);
    const int head_tile = places.head_tile(slot);
    if (head_tile == prefill::kNoMoreTasks) return;
    const Task& task = places.task(slot);
    load(task, head_tile, [&] {
      if (!leads) return;
      ptx::wait_phase(places.q_empty(), (count + 1) % 2);
      load_queries(p, places, q, task, head_tile);
      feed.next();
    });
    __syncwarp();
    count = ptx::kept(count);  // the slot is computed anew, rather than kept in a register
    if (!leads && threadIdx.x % 32 == 0) ptx::arrive(places.task_empty(slot_of_task(count)));
  }
}

// Whether rows of the block see different keys of a tile.
__device__ __forceinline__ bool is_edge(const PrefillParams& p, const Task& t, const Tile& tile) {
  const int position = t.num_keys - t.num_q + t.token_begin;
  return tile.start < prefill::first_visible(p, position + t.num_tokens - 1) ||
         tile.high > prefill::end_visible(p, t.num_keys, position);
}

}  // namespace attune::mla
