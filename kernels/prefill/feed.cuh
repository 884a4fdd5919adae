// SPDX-License-Identifier: Apache-2.0
// How a block of a persistent grid gets its tasks: one warp takes them from the list and hands them to the others through
// a ring of slots in shared memory.
#pragma once

#include "prefill/prefill_params.h"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "tile/turn.cuh"

namespace attune::prefill {

constexpr int kNoMoreTasks = -1;  // in place of a head tile

// Places: task(slot), head_tile(slot) and their barriers, task_full(slot) of kTaskVectors arrivals and task_empty(slot).
template <class Places>
class TaskFeed {
 public:
  // A task's pieces, each written by a lane.
  static constexpr int kTaskVectors = sizeof(kernels::Task) / 16;

  __device__ __forceinline__ TaskFeed(const kernels::PrefillParams& p, const Places& places)
      : p_(p), places_(places), lane_(threadIdx.x % 32), next_(blockIdx.x) {}

  // All lanes of the warp, in a loop: the slot of the next task, or -1. The task stays readable until the slot is needed
  // again; the others find kNoMoreTasks when there is no more.
  __device__ __forceinline__ int next() {
    const int heads_at_a_time = p_.list->heads_at_a_time, num_tasks = p_.list->num_tasks;
    const int num_items = num_tasks * p_.num_head_tiles;  // the host refuses more than 2^31
    const int item = __shfl_sync(0xffffffffu, static_cast<int>(next_), 0);
    if (item >= num_items) {
      publish(nullptr, kNoMoreTasks);
      return -1;
    }
    // All tasks for the first few head tiles, then for the next.
    const int section = item / (num_tasks * heads_at_a_time), first_head = section * heads_at_a_time;
    const int within = item - section * num_tasks * heads_at_a_time;
    const int heads = min(heads_at_a_time, p_.num_head_tiles - first_head);
    if (lane_ == 0) next_ = gridDim.x + ptx::count_arrival(&p_.list->next_item, num_items - 1);
    return publish(p_.tasks + within / heads, first_head + within % heads);
  }

 private:
  __device__ __forceinline__ int publish(const kernels::Task* from, int head_tile) {
    const int slot = turn_.stage;
    uint4 part{};
    if (from != nullptr && lane_ < kTaskVectors) part = reinterpret_cast<const uint4*>(from)[lane_];
    ptx::wait_phase(places_.task_empty(slot), turn_.parity ^ 1);
    if (lane_ < kTaskVectors) {
      reinterpret_cast<uint4*>(&places_.task(slot))[lane_] = part;
      if (lane_ == 0) places_.head_tile(slot) = head_tile;
      ptx::arrive(places_.task_full(slot));
    }
    __syncwarp();
    turn_.template next<kernels::kTaskSlots>();
    return slot;
  }

  const kernels::PrefillParams& p_;
  const Places& places_;
  const int lane_;
  unsigned next_;  // the first lane's counts
  tile::Turn turn_;
};

}  // namespace attune::prefill
