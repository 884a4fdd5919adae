// SPDX-License-Identifier: Apache-2.0
// The m16 kernel's sizes and shared addresses.
#pragma once

#include "mla/cached_rows.cuh"

namespace attune::mla {

struct M16Config : CachedRowsConfig {
  static constexpr int kBlockM = kernels::kMlaM16Rows;
  static constexpr int kConsumerWarps = kernels::kMlaM16ConsumerWarps, kThreads = kernels::kMlaM16Threads;
  static constexpr int kWorkReaders =
      kConsumerWarps + kProducerWarps - 1;  // Warps that read work tiles: all but the one that fetches them.
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kKeysOfWarp = kBlockN / kConsumerWarps;                // keys of S in a warp
  static constexpr int kChannelsOfWarp = Config::kHeadDimV / kConsumerWarps;  // channels of O in a warp

  static_assert(kThreads == kProducerThreads + 32 * kConsumerWarps, "host and device agree on the threads");
  static_assert(kKeysOfWarp == 8, "a warp's keys are the N = 8 of an mma");
};

using M16Storage = kernels::MlaM16Storage<M16Config::kStages, M16Config::kPitch>;
static_assert(Config::kProducer != kernels::kMlaGather ||
                  sizeof(M16Storage) == kernels::mla_m16_shared_bytes(Config::kHeadDimQk),
              "the host asks for another size");
static_assert(sizeof(M16Storage) <= kernels::kMostSharedBytes, "more shared memory than a block can have");

// Shared addresses.
struct M16Smem : CachedRowsView<M16Storage> {
  using CachedRowsView::CachedRowsView;
  // P: 128 bytes for each row.
  __device__ __forceinline__ unsigned p(unsigned buffer) const { return ATTUNE_SHARED_AT_INDEX(M16Storage, p, buffer); }
  // Eight floats for each row, one for each warp.
  __device__ __forceinline__ unsigned tile_row_max(unsigned buffer, int row) const {
    return ATTUNE_SHARED_AT_INDICES(M16Storage, tile_row_max, buffer, row);
  }
  __device__ __forceinline__ unsigned row_max_full(unsigned buffer) const {
    return ATTUNE_SHARED_AT_INDEX(M16Storage, barriers.row_max_full, buffer);
  }
  __device__ __forceinline__ unsigned p_full(unsigned buffer) const {
    return ATTUNE_SHARED_AT_INDEX(M16Storage, barriers.p_full, buffer);
  }
};

__device__ __forceinline__ void sync_m16_consumers() { ptx::named_barrier_sync(1, 32 * M16Config::kConsumerWarps); }

}  // namespace attune::mla
