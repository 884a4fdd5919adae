// SPDX-License-Identifier: Apache-2.0
// Shared memory of the prefill kernels, and the shared addresses of its fields.
#pragma once

#include "common/shared_view.cuh"
#include "prefill/config.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

// full: the data have arrived. empty: all readers are done.
struct RingBarriers {
  kernels::Barrier full, empty;
};
constexpr int kEdgeBarriers = kernels::prefill_edge_barriers(Config::kCluster, Config::kValueStages),
              kTileIdxSlots = kernels::prefill_tile_idx_slots(Config::kCluster);
// The second block lags the first by at most kStages + 2 indices, so it has read a slot before that is overwritten.
static_assert(Config::kCluster == 1 || kTileIdxSlots >= Config::kStages + 2, "indices overwrite those not yet read");
struct alignas(16) Barriers {
  kernels::Barrier k_full[Config::kStages], k_empty[Config::kStages], v_full[Config::kStages], v_empty[Config::kStages];
  kernels::Barrier work_full[kernels::kWorkSlots], work_empty[kernels::kWorkSlots];
  kernels::Barrier q_full[Config::kQueryStages], q_empty[Config::kQueryStages];
  // For the producer alone: tiles of V whose invisible rows it zeroes before it commits them. In a cluster there is one
  // for each stage, because the other block may copy the next such tile before this one has arrived.
  kernels::Barrier edge[kEdgeBarriers];
  [[no_unique_address]] kernels::SharedArray<RingBarriers, Config::kRawStages> raw;
  [[no_unique_address]] kernels::SharedArray<kernels::Barrier, kTileIdxSlots> tile_idx_full;
};

// Keys of a tile on pages that do not exist: one bit for each key. The bits are valid only if `any` is not 0.
struct alignas(16) TileMask {
  unsigned any;
  unsigned keys[Config::kKeys / 32];
};

// Scales by token of K and V, for one stage of K.
struct TileScales {
  static constexpr int kOfKey = kernels::tile_scales(Config::kTokenScales, Config::kHeadDimQk, Config::kHeadDimV);
  float keys[kOfKey][Config::kKeys], values[kOfKey][Config::kKeys];
};

struct SharedStorage {
  // Tiles are swizzled in atoms of 1,024 bytes: [bf16x3 parts][lines of channels][rows or keys][128 bytes].
  alignas(1024) unsigned char q[Config::kQueryStages][Config::kBytesQ];
  unsigned char k[Config::kStages][Config::kBytesK];
  unsigned char v[Config::kValueStages][Config::kBytesV];
  [[no_unique_address]] kernels::SharedArray<unsigned char[Config::kBytesRaw], Config::kRawStages> raw;
  Barriers barriers;
  TileMask masks[Config::kStages + Config::kRawStages];  // stages of K, then raw stages
  alignas(16) unsigned over_cap[2][2];                   // [consumer group][tile % 2]
  [[no_unique_address]] kernels::SharedArray<uint4, Config::kFp8 ? Config::kConsumerThreads : 0> limits;
  [[no_unique_address]] kernels::SharedArray<TileScales, Config::kQuantized ? Config::kStages : 0> scales;
  using Slot = kernels::WorkSlot;
  Slot slots[kernels::kWorkSlots];
  alignas(16) int is_last;  // whether this block finished the last split of a row block
  [[no_unique_address]] kernels::SharedArray<unsigned, kTileIdxSlots> tile_idx;
  kernels::ScheduleCheck check;
};

static_assert(sizeof(SharedStorage) == kernels::prefill_shared_bytes(Config::kRows, Config::kKeys, Config::kStages,
                                                                     Config::kRawStages, Config::kTokenScales,
                                                                     Config::kHeadDimQk, Config::kHeadDimV,
                                                                     Config::kElementSize, Config::kQueryStages,
                                                                     Config::kCluster),
              "the host asks for another size");
static_assert(sizeof(SharedStorage) <= kernels::kMostSharedBytes, "more shared memory than a block can have");

// Addresses in shared memory.
struct Smem : common::SharedView<SharedStorage> {
  using SharedView::SharedView;
  __device__ __forceinline__ long long& out_base(int slot) const { return this->slot(slot).out_base; }
  __device__ __forceinline__ int& is_last() const { return ATTUNE_SHARED_FIELD(SharedStorage, is_last); }

  __device__ __forceinline__ unsigned q(int stage = 0) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, q, stage); }
  __device__ __forceinline__ unsigned k(int stage) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, k, stage); }
  __device__ __forceinline__ unsigned v(int stage) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, v, stage); }
  __device__ __forceinline__ unsigned raw(int stage) const {
    return ATTUNE_SHARED_AT(SharedStorage, raw) + stage * Config::kBytesRaw;
  }

  __device__ __forceinline__ unsigned k_full(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.k_full, stage);
  }
  __device__ __forceinline__ unsigned k_empty(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.k_empty, stage);
  }
  __device__ __forceinline__ unsigned v_full(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.v_full, stage);
  }
  __device__ __forceinline__ unsigned v_empty(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.v_empty, stage);
  }
  __device__ __forceinline__ unsigned q_full(int stage = 0) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.q_full, stage);
  }
  __device__ __forceinline__ unsigned q_empty(int stage = 0) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.q_empty, stage);
  }
  __device__ __forceinline__ unsigned edge(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.edge, Config::kCluster > 1 ? stage : 0);
  }
  // scheduler/tile_idx_ring.cuh
  static constexpr unsigned kTileIdxSlots = prefill::kTileIdxSlots;
  __device__ __forceinline__ unsigned tile_idx(unsigned n) const {
    return ATTUNE_SHARED_AT(SharedStorage, tile_idx) + n % max(kTileIdxSlots, 1u) * 4;
  }
  __device__ __forceinline__ unsigned tile_idx_full(unsigned n) const {
    return ATTUNE_SHARED_AT(SharedStorage, barriers.tile_idx_full) + n % max(kTileIdxSlots, 1u) * 8;
  }
  __device__ __forceinline__ unsigned raw_full(int stage) const {
    return ATTUNE_SHARED_AT(SharedStorage, barriers.raw) + stage * static_cast<int>(sizeof(RingBarriers));
  }
  __device__ __forceinline__ unsigned raw_empty(int stage) const {
    return raw_full(stage) + ATTUNE_OFFSET_OF(RingBarriers, empty);
  }

  // TileMask of a stage of K, and of a raw stage.
  __device__ __forceinline__ unsigned mask(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, masks, stage);
  }
  __device__ __forceinline__ unsigned raw_mask(int stage) const { return mask(Config::kStages + stage); }
  // Nonzero if a tile of a consumer warpgroup had scores outside the range of run_softcap_small(). Two flags alternate,
  // because a warp may write the next tile's flag before another warp has read this tile's.
  __device__ __forceinline__ unsigned over_cap(int group, int tile) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, over_cap, group, tile & 1);
  }
  // A slot of this consumer thread for values that do not fit its registers.
  __device__ __forceinline__ unsigned limits() const {
    return ATTUNE_SHARED_AT(SharedStorage, limits) + static_cast<int>(sizeof(uint4)) * consumer_thread();
  }
  __device__ __forceinline__ float* scales(int stage, bool values) const {
    TileScales& x = value_at<TileScales>(ATTUNE_OFFSET_OF(SharedStorage, scales), stage);
    return values ? x.values[0] : x.keys[0];
  }
};

}  // namespace attune::prefill
