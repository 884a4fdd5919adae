// SPDX-License-Identifier: Apache-2.0
// MLA attention of at most 32 query heads, or 16, one token at a time, over packed rows of 656 bytes; dense or sparse.
// As mla/few.cu, with rows as they lie in the cache in shared memory, four tiles at a time; but products are by wgmma,
// whose left operand are codes that become 16-bit numbers in registers, and the right one queries and weights in shared
// memory.
//
// A task is a token and the tiles of keys that it may see, 64 each. Two warps have them copied (few_load.cuh), one
// follows their scales (half_units.cuh), four have scores of all of them (half_scores.cuh), four values and outputs
// (half_attend.cuh).
//
// Barriers: "full" and "empty" of each tile's place; "full" of the maxima, and units, of a tile, in two buffers; "full"
// and "empty" of the weights of a tile, from the warps that have scores to those that have values.
#include "mla/few_load.cuh"
#include "mla/half_store.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

using HalfLoader = CachedRowLoader<Half, HalfPlaces>;

__device__ __forceinline__ void init_barriers(const HalfPlaces& places) {
  if (threadIdx.x == 32) {
    places.check() = {};
    for (int stage = 0; stage < Half::kStages; ++stage) {
      ptx::init_barrier(places.full(stage), Half::kLoaderWarps);
      ptx::init_barrier(places.empty(stage), 4);
      ptx::init_barrier(places.maxima_full(stage), 4 + 1);
    }
    ptx::init_barrier(places.weights_full(), 4);
    ptx::init_barrier(places.weights_empty(), 4);
    for (int i = 0; i < kernels::kTaskSlots; ++i) {
      ptx::init_barrier(places.task_full(i), prefill::TaskFeed<HalfPlaces>::kTaskVectors);
      ptx::init_barrier(places.task_empty(i), Half::kTaskReaders);
    }
    ptx::publish_barriers();
  }
  __syncthreads();
}

// work(task, head_tile): a task's.
template <class Work>
__device__ __forceinline__ void run_tasks(const HalfPlaces& places, const Work& work) {
  for (unsigned count = 0;; ++count) {
    const int slot = slot_of_task(count);
    ptx::wait_phase(places.task_full(slot), count / kernels::kTaskSlots % 2);
    if (places.head_tile(slot) == prefill::kNoMoreTasks) return;
    work(places.task(slot), places.head_tile(slot));
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(places.task_empty(slot));
  }
}
__device__ __forceinline__ void run_scores(const PrefillParams& p, const HalfPlaces& places) {
  schedule::check_stamp<Config::kSparse>(p, static_cast<int>(threadIdx.x) - Half::kLoaderThreads,
                                         32 * Half::kScoreWarps, places.check(), [] { meet_scorers(); });
  HalfScores a(p, places);
  run_tasks(places, [&](const Task& task, int head_tile) {
    a.run(task, head_tile);
    a.tell_rows();
    meet_half();
    ptx::sync_roles(kHeard, 32 * Half::kMathWarps);
  });
}
__device__ __forceinline__ void run_values(const PrefillParams& p, const HalfPlaces& places) {
  HalfAttend a(p, places);
  run_tasks(places, [&](const Task& task, int head_tile) {
    a.run(task, head_tile);
    HalfStore(p, places, task, head_tile).store(a);
  });
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::mla::Half::kThreads, 1)
    attune_mla_half(const __grid_constant__ attune::kernels::PrefillParams p,
                    const __grid_constant__ attune::ptx::TensorMap, const __grid_constant__ attune::ptx::TensorMap,
                    const __grid_constant__ attune::ptx::TensorMap) {
  using namespace attune;
  using namespace attune::mla;
  const HalfPlaces places(ptx::dynamic_shared());
  const HalfLoader::Feed::First asked = HalfLoader::Feed::ask_first(p);  // while the barriers are prepared
  init_barriers(places);
  if (threadIdx.x < Half::kLoaderThreads) {
    ptx::give_up_registers<Half::kLoaderRegisters>();
    if (threadIdx.x / 32 == Half::kUnitWarp) {
      HalfUnitWarp(places).run();
    } else {
      HalfLoader(p, places).run(asked);
    }
  } else if (half_group() < 2) {
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0 && threadIdx.x == Half::kLoaderThreads) prefill::pass_list_on(p);
    ptx::take_registers<Half::kScoreRegisters>();
    run_scores(p, places);
  } else {
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    ptx::take_registers<Half::kValueRegisters>();
    run_values(p, places);
  }
}
