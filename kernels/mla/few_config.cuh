// SPDX-License-Identifier: Apache-2.0
// Of the kernel of few rows: its sizes, and where things lie in its shared memory.
#pragma once

#include "mla/config.cuh"

namespace attune::mla {

struct Few {
  static constexpr int kRows = kernels::kMlaFewRows, kKeys = Config::kKeys, kStages = kernels::kMlaFewStages;
  static constexpr int kMathWarps = kernels::kMlaFewMathWarps, kThreads = kernels::kMlaFewThreads;
  static constexpr int kLoaderThreads = kThreads - 32 * kMathWarps;  // a warpgroup, of which two warps load
  static constexpr int kLoaderWarps = 2, kKeysOfLoader = kKeys / kLoaderWarps;
  static constexpr int kTaskReaders = kMathWarps + kLoaderWarps - 1;  // warps, without the one that takes tasks
  static constexpr int kLoaderRegisters = 40, kMathRegisters = 232;
  static constexpr int kGroups = Packed::kGroups;                 // of channels, with a scale each
  static constexpr int kKeysOfWarp = kKeys / kMathWarps;          // of which it computes scores
  static constexpr int kChannelsOfWarp = Config::kHeadDimV / kMathWarps;  // of its output
  static constexpr int kBlocks = Packed::kNope / 16;              // of 16 channels, a step of products each
  static constexpr int kRopeBlocks = Config::kHeadDimQk / 16 - kBlocks;
  static constexpr kernels::MlaFewShared kShared = kernels::mla_few_shared(Packed::kRowBytes, kGroups);

  static_assert(Config::kLoader == kernels::kMlaCodes656 && Config::kCluster == 1 && !Config::kDense,
                "rows of 656 bytes in a cache");
  static_assert(Packed::kRowBytes % 128 == 16, "the same 16 bytes of eight rows lie in different banks");
  static_assert(Packed::kGroup % kChannelsOfWarp == 0, "a warp's channels have one scale");
  static_assert(kKeysOfWarp == 8, "keys of a warp are the columns of a product");
  static_assert(kBlocks * 512 <= 2 * kGroups * kRows * kKeys * 2, "queries pass through where weights are");
  static_assert(kShared.total <= 232448, "more shared memory than a block can have");
};

// Where a tile is, and whether for the even or odd time.
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void go_on() {
    if (++stage == Few::kStages) stage = 0, parity ^= 1;
  }
};

struct FewPlaces {
  unsigned char* memory;
  unsigned base;
  __device__ __forceinline__ explicit FewPlaces(unsigned char* shared)
      : memory(shared), base(ptx::shared_address(shared)) {}
  __device__ __forceinline__ unsigned char* task_memory(int slot) const {
    return memory + Few::kShared.tasks + slot * (sizeof(Task) + 16);
  }
  __device__ __forceinline__ Task& task(int slot) const { return *reinterpret_cast<Task*>(task_memory(slot)); }
  __device__ __forceinline__ int& head_tile(int slot) const {
    return *reinterpret_cast<int*>(task_memory(slot) + sizeof(Task));
  }
  // A cached row as it is.
  __device__ __forceinline__ unsigned row(int stage, int key) const {
    return base + Few::kShared.tiles + (stage * Few::kKeys + key) * Packed::kRowBytes;
  }
  // A bit for each key that is not there.
  __device__ __forceinline__ unsigned note(int stage) const {
    return base + Few::kShared.notes + stage * kernels::kMlaFewNoteBytes;
  }
  // Of one group of channels: weights of all keys for each row, 128 bytes, whose pieces of 16 are swizzled.
  __device__ __forceinline__ unsigned weights(unsigned buffer, int group) const {
    return base + Few::kShared.weights + (buffer * Few::kGroups + group) * (Few::kRows * Few::kKeys * 2);
  }
  // Queries of 16 channels as each lane has them in a product.
  __device__ __forceinline__ unsigned queries(int block, int lane) const {
    return base + Few::kShared.weights + (block * 32 + lane) * 16;
  }
  // Eight numbers of a row, one from each warp.
  __device__ __forceinline__ unsigned maxima(unsigned buffer, int row) const {
    return base + Few::kShared.maxima + (buffer * Few::kRows + row) * (4 * Few::kMathWarps);
  }
  __device__ __forceinline__ unsigned sums(int row) const {
    return base + Few::kShared.sums + row * (4 * Few::kMathWarps);
  }
  __device__ __forceinline__ unsigned factors(int row) const {
    return base + Few::kShared.factors + row * (4 * Few::kGroups);
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

// Of the math warps.
__device__ __forceinline__ int few_warp() { return static_cast<int>(threadIdx.x) / 32 - Few::kLoaderThreads / 32; }
__device__ __forceinline__ void meet_few() { ptx::sync_some(1, 32 * Few::kMathWarps); }

}  // namespace attune::mla
