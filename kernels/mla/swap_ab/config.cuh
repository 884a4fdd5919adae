// SPDX-License-Identifier: Apache-2.0
// Of the kernel of half a block of rows, or a quarter: its sizes, and the addresses in its shared memory.
#pragma once

#include "mla/m16/config.cuh"

namespace attune::mla {

struct Half : Few {
  static constexpr int kRows = ATTUNE_ROWS;  // 16 or 32
  static constexpr int kChunkBytes = kRows * 128;
  static constexpr int kWeightsBytes = kRows * kKeys * 2;
  static constexpr int kUnitWarp = kLoaderWarps;  // that follows scales
  // Two groups of four warps have scores, of every other tile each; one values.
  static constexpr int kThreads = kernels::kMlaHalfThreads, kMathWarps = 12, kScoreWarps = 8;
  static constexpr int kWorkReaders = kMathWarps + kLoaderWarps;
  static constexpr int kLoaderRegisters = kRows == 16 ? 56 : 48, kScoreRegisters = 136,
                       kValueRegisters = kRows == 16 ? 184 : 192;

  static_assert(kStages % 2 == 0, "a stage's maxima are one group's, which knows that the other has read them");
  static_assert(Config::kLoader == kernels::kMlaCodes656 && Packed::kGroups == kernels::kMlaHalfGroups &&
                    kRowBytes == Packed::kRowBytes && Packed::kHeadDim == Config::kHeadDimQk && kRows % 8 == 0,
                "packed rows with a scale for each 128 channels");
};

using HalfStorage = kernels::MlaHalfStorage<Half::kRows>;
static_assert(sizeof(HalfStorage) == kernels::mla_half_shared_bytes(Half::kRows), "the host asks for another size");
static_assert(sizeof(HalfStorage) <= kernels::kMostSharedBytes, "more shared memory than a block can have");

// Addresses in shared memory.
struct HalfSmem : tile::SharedView<HalfStorage> {
  using SharedView::SharedView;
  __device__ __forceinline__ kernels::ScheduleCheck& check() const { return ATTUNE_SHARED_FIELD(HalfStorage, check); }
  // With which sums begin (kernels::ScheduleCheck).
  __device__ __forceinline__ float first_sum() const {
    return ptx::load_shared(ATTUNE_SHARED_AT(HalfStorage, check.first_sum));
  }
  __device__ __forceinline__ unsigned row(int stage, int key) const {
    return ATTUNE_SHARED_AT_INDICES(HalfStorage, tiles, stage, key);
  }
  // kernels::MlaFewNote, whose first words are `absent`.
  __device__ __forceinline__ unsigned note(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, notes, stage);
  }
  __device__ __forceinline__ unsigned units(int stage) const {
    return note(stage) + ATTUNE_OFFSET_OF(kernels::MlaFewNote, units);
  }
  __device__ __forceinline__ unsigned source(int key) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, sources, key);
  }
  // 64 channels of all queries; the last are those of the rope part.
  __device__ __forceinline__ unsigned q(int chunk) const { return ATTUNE_SHARED_AT_INDEX(HalfStorage, q, chunk); }
  // Of one group of channels: weights of all keys for each row.
  __device__ __forceinline__ unsigned weights(int group) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, weights, group);
  }
  // Four numbers of a row of a tile's scores.
  __device__ __forceinline__ unsigned maxima(int stage, int row) const {
    return ATTUNE_SHARED_AT_INDICES(HalfStorage, maxima, stage, row);
  }
  __device__ __forceinline__ unsigned factor(int group, int row) const {
    return ATTUNE_SHARED_AT_INDICES(HalfStorage, factors, group, row);
  }
  __device__ __forceinline__ unsigned lowered(int row) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, lowered, row);
  }
  __device__ __forceinline__ unsigned changes() const { return ATTUNE_SHARED_AT(HalfStorage, changes); }
  __device__ __forceinline__ unsigned sums(int row) const { return ATTUNE_SHARED_AT_INDEX(HalfStorage, sums, row); }
  __device__ __forceinline__ unsigned state(int row) const { return ATTUNE_SHARED_AT_INDEX(HalfStorage, state, row); }
  __device__ __forceinline__ unsigned bounds(int row) const { return ATTUNE_SHARED_AT_INDEX(HalfStorage, bounds, row); }
  __device__ __forceinline__ unsigned token(int row) const { return ATTUNE_SHARED_AT_INDEX(HalfStorage, token, row); }

  __device__ __forceinline__ unsigned full(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, barriers.full, stage);
  }
  __device__ __forceinline__ unsigned empty(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, barriers.empty, stage);
  }
  __device__ __forceinline__ unsigned maxima_full(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, barriers.maxima_full, stage);
  }
  __device__ __forceinline__ unsigned weights_full() const {
    return ATTUNE_SHARED_AT(HalfStorage, barriers.weights_full);
  }
  __device__ __forceinline__ unsigned weights_empty() const {
    return ATTUNE_SHARED_AT(HalfStorage, barriers.weights_empty);
  }
  __device__ __forceinline__ unsigned work_full(int slot) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, barriers.work_full, slot);
  }
  __device__ __forceinline__ unsigned work_empty(int slot) const {
    return ATTUNE_SHARED_AT_INDEX(HalfStorage, barriers.work_empty, slot);
  }
};

}  // namespace attune::mla
