// SPDX-License-Identifier: Apache-2.0
// The swap-AB kernel's sizes and shared addresses.
#pragma once

#include "mla/cached_rows.cuh"

namespace attune::mla {

struct SwapAbConfig : CachedRowsConfig {
  static constexpr int kBlockM = ATTUNE_ROWS;  // 16 or 32
  static constexpr int kChunkBytes = kBlockM * 128;
  static constexpr int kPBytes = kBlockM * kBlockN * 2;
  static constexpr int kUnitWarp = kProducerWarps;  // the scale unit warp
  // Two softmax warpgroups, which take every other tile each; one PV warpgroup.
  static constexpr int kThreads = kernels::kMlaSwapAbThreads, kConsumerWarps = 12, kSoftmaxWarps = 8;
  static constexpr int kWorkReaders = kConsumerWarps + kProducerWarps;
  static constexpr int kProducerRegisters = kBlockM == 16 ? 56 : 48, kSoftmaxRegisters = 136,
                       kPvRegisters = kBlockM == 16 ? 184 : 192;

  static_assert(kStages % 2 == 0, "a stage's tile_row_max belongs to one warpgroup");
  static_assert(Config::kProducer == kernels::kMlaDequant656 && Packed::kGroups == kernels::kMlaScaleGroups &&
                    kRowBytes == Packed::kRowBytes && Packed::kHeadDim == Config::kHeadDimQk && kBlockM % 8 == 0,
                "packed rows with a scale for each 128 channels");
};

using SwapAbStorage = kernels::MlaSwapAbStorage<SwapAbConfig::kBlockM>;
static_assert(sizeof(SwapAbStorage) == kernels::mla_swap_ab_shared_bytes(SwapAbConfig::kBlockM),
              "the host asks for another size");
static_assert(sizeof(SwapAbStorage) <= kernels::kMostSharedBytes, "more shared memory than a block can have");

// Shared addresses.
struct SwapAbSmem : CachedRowsView<SwapAbStorage> {
  using CachedRowsView::CachedRowsView;
  __device__ __forceinline__ unsigned units(int stage) const {
    return mask(stage) + ATTUNE_OFFSET_OF(kernels::MlaCachedTileMask, units);
  }
  // A chunk is 64 channels of all queries; the last chunk has the rope channels.
  __device__ __forceinline__ unsigned q(int chunk) const { return ATTUNE_SHARED_AT_INDEX(SwapAbStorage, q, chunk); }
  // P times the scales of one scale group, for all keys of each row.
  __device__ __forceinline__ unsigned p(int group) const { return ATTUNE_SHARED_AT_INDEX(SwapAbStorage, p, group); }
  // Four floats for each row, one for each warp.
  __device__ __forceinline__ unsigned tile_row_max(int stage, int row) const {
    return ATTUNE_SHARED_AT_INDICES(SwapAbStorage, tile_row_max, stage, row);
  }
  __device__ __forceinline__ unsigned q_factor(int group, int row) const {
    return ATTUNE_SHARED_AT_INDICES(SwapAbStorage, q_factors, group, row);
  }
  __device__ __forceinline__ unsigned rescale(int row) const {
    return ATTUNE_SHARED_AT_INDEX(SwapAbStorage, rescale, row);
  }
  __device__ __forceinline__ unsigned any_rescale() const { return ATTUNE_SHARED_AT(SwapAbStorage, any_rescale); }
  __device__ __forceinline__ unsigned row_max(int row) const {
    return ATTUNE_SHARED_AT_INDEX(SwapAbStorage, row_max, row);
  }
  __device__ __forceinline__ unsigned bounds(int row) const {
    return ATTUNE_SHARED_AT_INDEX(SwapAbStorage, bounds, row);
  }
  __device__ __forceinline__ unsigned token(int row) const { return ATTUNE_SHARED_AT_INDEX(SwapAbStorage, token, row); }

  __device__ __forceinline__ unsigned row_max_full(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SwapAbStorage, barriers.row_max_full, stage);
  }
  __device__ __forceinline__ unsigned p_full() const { return ATTUNE_SHARED_AT(SwapAbStorage, barriers.p_full); }
  __device__ __forceinline__ unsigned p_empty() const { return ATTUNE_SHARED_AT(SwapAbStorage, barriers.p_empty); }
};

}  // namespace attune::mla
