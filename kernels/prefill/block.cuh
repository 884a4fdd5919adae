// SPDX-License-Identifier: Apache-2.0
// What the blocks of all prefill kernels do: barriers, and waiting for tasks.
#pragma once

#include "prefill/config.cuh"
#include "prefill/feed.cuh"
#include "ptx/grid.cuh"

namespace attune::prefill {

// Where the launch before this one serves the call's short sequences (few_q), this one runs beside it. It may begin
// once each block of that launch has allowed it, which they do when they have waited for all before them
// (decode/decode.cu): so whatever wrote q, k, v, the cache or the schedule has ended and is visible, and whatever had
// the workspace before. That launch writes nothing that this one reads, and does not wait for it. A loader of each
// block waits for it at the end: who waits for this one waits for both. PTX promises what grids before have written
// only to those that wait; here it is visible because those grids ended before this one was launched.
__device__ __forceinline__ void start_after_previous_kernels(const PrefillParams& p) {
  if (!Config::kCached || p.few_q == 0) ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
}
__device__ __forceinline__ void end_after_previous_kernels() {
  if constexpr (Config::kCached) ptx::wait_for_previous_kernels();
}

__device__ __forceinline__ void init_barriers(const Places& places) {
  constexpr int kQueryWriters = Config::kFloats ? Config::kSplitWarps : 1;
  constexpr int kKeyWriters = Config::kGathers ? Config::kGatherWarps : kQueryWriters;
  constexpr int kValueWriters = Config::kCodes ? Config::kTransposeWarps : kKeyWriters;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::init_barrier(places.k_full(i), kKeyWriters);
      ptx::init_barrier(places.v_full(i), kValueWriters);
      ptx::init_barrier(places.k_empty(i), Config::kMathWarps);
      ptx::init_barrier(places.v_empty(i), Config::kMathWarps);
    }
    for (int i = 0; i < kernels::kTaskSlots; ++i) {
      ptx::init_barrier(places.task_full(i), TaskFeed<Places>::kTaskVectors);
      ptx::init_barrier(places.task_empty(i), Config::kTaskReaders);
    }
    for (int i = 0; i < 2 * Config::kRawStages; ++i)  // and raw_empty
      ptx::init_barrier(places.raw_full(i), i < Config::kRawStages ? 1 : kValueWriters);
    for (int i = 0; i < Config::kQueryStages; ++i) {
      ptx::init_barrier(places.q_full(i), kQueryWriters);
      ptx::init_barrier(places.q_empty(i), Config::kMathWarps);
    }
    ptx::init_barrier(places.edge(), 1);
    ptx::publish_barriers();
  }
  __syncthreads();
}

// The head tile of the slot's task, or kNoMoreTasks; waits for it. The same for a warp.
__device__ __forceinline__ int head_tile_of(const Places& places, const Turn& slot) {
  ptx::wait_phase(places.task_full(slot.stage), slot.parity);
  return __shfl_sync(0xffffffffu, places.head_tile(slot.stage), 0);
}
__device__ __forceinline__ bool has_task(const Places& places, const Turn& slot) {
  return head_tile_of(places, slot) != kNoMoreTasks;
}

}  // namespace attune::prefill
