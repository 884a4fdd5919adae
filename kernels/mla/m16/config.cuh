// SPDX-License-Identifier: Apache-2.0
// Of the kernel of few rows: its sizes, and the addresses in its shared memory.
#pragma once

#include "mla/config.cuh"

namespace attune::mla {

struct Few {
  static constexpr kernels::MlaFewFormat kFormat = kernels::mla_few_format(Config::kLoader, Config::kHeadDimQk);
  static constexpr int kRows = kernels::kMlaFewRows, kKeys = Config::kKeys, kStages = kFormat.stages;
  static constexpr int kRowBytes = kFormat.row_bytes, kPitch = kFormat.pitch;  // of cached rows
  static constexpr int kMathWarps = kernels::kMlaFewMathWarps, kThreads = kernels::kMlaFewThreads;
  static constexpr int kLoaderThreads = kThreads - 32 * kMathWarps;  // a warpgroup, of which two warps load
  static constexpr int kLoaderWarps = 2, kKeysOfLoader = kKeys / kLoaderWarps;
  static constexpr int kWorkReaders = kMathWarps + kLoaderWarps - 1;  // warps, without the one that takes work tiles
  static constexpr int kLoaderRegisters = 56, kMathRegisters = 224;
  static constexpr int kKeysOfWarp = kKeys / kMathWarps;                  // of which it computes scores
  static constexpr int kChannelsOfWarp = Config::kHeadDimV / kMathWarps;  // of its output

  static_assert(!Config::kCopiesBoxes && Config::kLoader != kernels::kMlaCodes584 && Config::kCluster == 1 &&
                    !(Config::kDense && Config::kSparse),
                "rows of 656 bytes or of 16-bit elements, in a cache");
  static_assert(kPitch % 128 == 16, "the same 16 bytes of eight rows lie in different banks");
  static_assert(kKeysOfWarp == 8, "keys of a warp are the columns of a product");
};

using FewStorage = kernels::MlaFewStorage<Few::kStages, Few::kPitch>;
static_assert(Config::kLoader != kernels::kMlaRows ||
                  sizeof(FewStorage) == kernels::mla_few_shared_bytes(Config::kHeadDimQk),
              "the host asks for another size");
static_assert(sizeof(FewStorage) <= kernels::kMostSharedBytes, "more shared memory than a block can have");

// Addresses in shared memory.
struct FewSmem : tile::SharedView<FewStorage> {
  using SharedView::SharedView;
  __device__ __forceinline__ kernels::ScheduleCheck& check() const { return ATTUNE_SHARED_FIELD(FewStorage, check); }
  // With which sums begin (kernels::ScheduleCheck).
  __device__ __forceinline__ float first_sum() const {
    return ptx::load_shared(ATTUNE_SHARED_AT(FewStorage, check.first_sum));
  }
  __device__ __forceinline__ unsigned row(int stage, int key) const {
    return ATTUNE_SHARED_AT_INDICES(FewStorage, tiles, stage, key);
  }
  // kernels::MlaFewNote, whose first words are `absent`.
  __device__ __forceinline__ unsigned note(int stage) const { return ATTUNE_SHARED_AT_INDEX(FewStorage, notes, stage); }
  __device__ __forceinline__ unsigned source(int key) const { return ATTUNE_SHARED_AT_INDEX(FewStorage, sources, key); }
  // A row has 128 bytes.
  __device__ __forceinline__ unsigned weights(unsigned buffer) const {
    return ATTUNE_SHARED_AT_INDEX(FewStorage, weights, buffer);
  }
  // Eight numbers of a row, one from each warp.
  __device__ __forceinline__ unsigned maxima(unsigned buffer, int row) const {
    return ATTUNE_SHARED_AT_INDICES(FewStorage, maxima, buffer, row);
  }
  __device__ __forceinline__ unsigned sums(int row) const { return ATTUNE_SHARED_AT_INDEX(FewStorage, sums, row); }
  __device__ __forceinline__ unsigned full(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(FewStorage, barriers.full, stage);
  }
  __device__ __forceinline__ unsigned empty(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(FewStorage, barriers.empty, stage);
  }
  __device__ __forceinline__ unsigned maxima_full(unsigned buffer) const {
    return ATTUNE_SHARED_AT_INDEX(FewStorage, barriers.maxima_full, buffer);
  }
  __device__ __forceinline__ unsigned weights_full(unsigned buffer) const {
    return ATTUNE_SHARED_AT_INDEX(FewStorage, barriers.weights_full, buffer);
  }
  __device__ __forceinline__ unsigned work_full(int slot) const {
    return ATTUNE_SHARED_AT_INDEX(FewStorage, barriers.work_full, slot);
  }
  __device__ __forceinline__ unsigned work_empty(int slot) const {
    return ATTUNE_SHARED_AT_INDEX(FewStorage, barriers.work_empty, slot);
  }
};

// The end of a work tile's tiles of cached keys; new tokens come after them.
__device__ __forceinline__ int few_tile_end(const WorkTile& work) {
  if constexpr (Config::kDense)
    return min(work.tile_end, Line(work.num_cached, work.first_key, work.end_key).num_cached_tiles);
  return work.tile_end;
}

// Of the math warps. _anew: computed, with what follows from it, wherever it is asked for, as registers are scarce.
__device__ __forceinline__ int few_warp() { return static_cast<int>(threadIdx.x) / 32 - Few::kLoaderThreads / 32; }
__device__ __forceinline__ int few_warp_anew() {
  return static_cast<int>(ptx::kept(threadIdx.x) / 32) - Few::kLoaderThreads / 32;
}
__device__ __forceinline__ int few_lane_anew() { return static_cast<int>(ptx::kept(threadIdx.x) % 32); }
__device__ __forceinline__ void meet_few() { ptx::sync_some(1, 32 * Few::kMathWarps); }

}  // namespace attune::mla
