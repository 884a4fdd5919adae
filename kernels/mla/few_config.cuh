// SPDX-License-Identifier: Apache-2.0
// Of the kernel of few rows: its sizes, and where things lie in its shared memory.
#pragma once

#include "mla/config.cuh"

namespace attune::mla {

struct Few {
  static constexpr kernels::MlaFewFormat kFormat = kernels::mla_few_format(Config::kLoader, Config::kHeadDimQk);
  static constexpr kernels::MlaFewShared kShared = kernels::mla_few_shared(kFormat);
  static constexpr int kRows = kernels::kMlaFewRows, kKeys = Config::kKeys, kStages = kFormat.stages;
  static constexpr int kRowBytes = kFormat.row_bytes, kPitch = kFormat.pitch;  // of cached rows
  static constexpr int kMathWarps = kernels::kMlaFewMathWarps, kThreads = kernels::kMlaFewThreads;
  static constexpr int kLoaderThreads = kThreads - 32 * kMathWarps;  // a warpgroup, of which two warps load
  static constexpr int kLoaderWarps = 2, kKeysOfLoader = kKeys / kLoaderWarps;
  static constexpr int kTaskReaders = kMathWarps + kLoaderWarps - 1;  // warps, without the one that takes tasks
  static constexpr int kLoaderRegisters = 56, kMathRegisters = 224;
  static constexpr int kKeysOfWarp = kKeys / kMathWarps;                  // of which it computes scores
  static constexpr int kChannelsOfWarp = Config::kHeadDimV / kMathWarps;  // of its output

  static_assert(!Config::kCopiesBoxes && Config::kLoader != kernels::kMlaCodes584 && Config::kCluster == 1 &&
                    !(Config::kDense && Config::kSparse),
                "rows of 656 bytes or of 16-bit elements, in a cache");
  static_assert(kPitch % 128 == 16, "the same 16 bytes of eight rows lie in different banks");
  static_assert(kKeysOfWarp == 8, "keys of a warp are the columns of a product");
  static_assert(kShared.total <= 232448, "more shared memory than a block can have");
};

struct FewPlaces : prefill::TaskPlaces<Few::kShared.tasks> {
  using TaskPlaces::TaskPlaces;
  // A cached row as it is.
  __device__ __forceinline__ unsigned row(int stage, int key) const {
    return base + Few::kShared.tiles + (stage * Few::kKeys + key) * Few::kPitch;
  }
  // A bit for each key that is not there.
  __device__ __forceinline__ unsigned note(int stage) const {
    return base + Few::kShared.notes + stage * kernels::kMlaFewNoteBytes;
  }
  // Where a row of the tile that is being copied lies.
  __device__ __forceinline__ unsigned source(int key) const { return base + Few::kShared.sources + 8 * key; }
  static constexpr int kWeightsBytes = Few::kRows * Few::kKeys * 2;
  // Weights of all keys for each row, 128 bytes, whose pieces of 16 are swizzled.
  __device__ __forceinline__ unsigned weights(unsigned buffer) const {
    return base + Few::kShared.weights + buffer * kWeightsBytes;
  }
  // Eight numbers of a row, one from each warp.
  __device__ __forceinline__ unsigned maxima(unsigned buffer, int row) const {
    return base + Few::kShared.maxima + (buffer * Few::kRows + row) * (4 * Few::kMathWarps);
  }
  __device__ __forceinline__ unsigned sums(int row) const {
    return base + Few::kShared.sums + row * (4 * Few::kMathWarps);
  }
  __device__ __forceinline__ unsigned barrier(int i) const { return base + Few::kShared.barriers + 8 * i; }
  __device__ __forceinline__ unsigned full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ unsigned empty(int stage) const { return barrier(Few::kStages + stage); }
  __device__ __forceinline__ unsigned maxima_full(unsigned buffer) const { return barrier(2 * Few::kStages + buffer); }
  __device__ __forceinline__ unsigned weights_full(unsigned buffer) const {
    return barrier(2 * Few::kStages + 2 + buffer);
  }
  __device__ __forceinline__ unsigned task_full(int slot) const { return barrier(2 * Few::kStages + 4 + slot); }
  __device__ __forceinline__ unsigned task_empty(int slot) const {
    return barrier(2 * Few::kStages + 4 + kernels::kTaskSlots + slot);
  }
};

// The end of a task's tiles of cached keys; new tokens come after them.
__device__ __forceinline__ int few_tile_end(const Task& task) {
  if constexpr (Config::kDense)
    return min(task.tile_end, Line(task.num_cached, task.first_key, task.end_key).num_cached_tiles);
  return task.tile_end;
}

// Of the math warps. _anew: computed, with what follows from it, wherever it is asked for, as registers are scarce.
__device__ __forceinline__ int few_warp() { return static_cast<int>(threadIdx.x) / 32 - Few::kLoaderThreads / 32; }
__device__ __forceinline__ int few_warp_anew() {
  return static_cast<int>(ptx::kept(threadIdx.x) / 32) - Few::kLoaderThreads / 32;
}
__device__ __forceinline__ int few_lane_anew() { return static_cast<int>(ptx::kept(threadIdx.x) % 32); }
__device__ __forceinline__ void meet_few() { ptx::sync_some(1, 32 * Few::kMathWarps); }

}  // namespace attune::mla
