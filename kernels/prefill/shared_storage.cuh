// SPDX-License-Identifier: Apache-2.0
// The shared memory of a block of the prefill kernels, and the addresses in it.
#pragma once

#include "prefill/config.cuh"
#include "ptx/shared.cuh"
#include "tile/shared_view.cuh"

namespace attune::prefill {

// "full" says that data have come, "empty" that all math warps have read them.
struct RingBarriers {
  kernels::Barrier full, empty;
};
struct alignas(16) Barriers {
  kernels::Barrier k_full[Config::kStages], k_empty[Config::kStages], v_full[Config::kStages], v_empty[Config::kStages];
  kernels::Barrier work_full[kernels::kWorkSlots], work_empty[kernels::kWorkSlots];
  kernels::Barrier q_full[Config::kQueryStages], q_empty[Config::kQueryStages];
  kernels::Barrier edge;  // the producer's own: values that it clears in part before it hands them over
  [[no_unique_address]] kernels::SharedArray<RingBarriers, Config::kRawStages> raw;
};

// Which keys of a tile lie on pages that are not there: a bit for each, where `any` is not 0.
struct alignas(16) TileMask {
  unsigned any;
  unsigned keys[Config::kKeys / 32];
};

// Of the keys, and of the values, of a tile of the ring of K.
struct TileScales {
  float keys[Config::kKeys], values[Config::kKeys];
};

struct SharedStorage {
  // Tiles are swizzled in atoms of 1,024 bytes: [parts][blocks of a line's channels][rows or keys][128 bytes].
  alignas(1024) unsigned char q[Config::kQueryStages][Config::kBytesQ];
  unsigned char k[Config::kStages][Config::kBytesK];
  unsigned char v[Config::kValueStages][Config::kBytesV];
  [[no_unique_address]] kernels::SharedArray<unsigned char[Config::kBytesRaw], Config::kRawStages> raw;
  Barriers barriers;
  TileMask masks[Config::kStages + Config::kRawStages];  // of the ring of K, then of the ring of codes
  alignas(16) unsigned over_cap[2][2];                   // [math group][tile % 2]
  [[no_unique_address]] kernels::SharedArray<uint4, Config::kFp8 ? Config::kMathThreads : 0> limits;
  [[no_unique_address]] kernels::SharedArray<TileScales, Config::kQuantized ? Config::kStages : 0> scales;
  using Slot = kernels::WorkSlot;
  Slot slots[kernels::kWorkSlots];
  alignas(16) int is_last;  // whether this block has the last part of a cut block of rows
  kernels::ScheduleCheck check;
};

static_assert(sizeof(SharedStorage) == kernels::prefill_shared_bytes(Config::kRows, Config::kKeys, Config::kStages,
                                                                     Config::kRawStages, Config::kHeadDimQk,
                                                                     Config::kHeadDimV, Config::kElementSize,
                                                                     Config::kQueryStages),
              "the host asks for another size");
static_assert(sizeof(SharedStorage) <= kernels::kMostSharedBytes, "more shared memory than a block can have");

// Addresses in shared memory.
struct Smem : tile::SharedView<SharedStorage> {
  using SharedView::SharedView;
  __device__ __forceinline__ long long& out_base(int slot) const { return this->slot(slot).out_base; }
  __device__ __forceinline__ int& is_last() const { return ATTUNE_SHARED_FIELD(SharedStorage, is_last); }
  __device__ __forceinline__ kernels::ScheduleCheck& check() const { return ATTUNE_SHARED_FIELD(SharedStorage, check); }
  // With which sums begin (kernels::ScheduleCheck).
  __device__ __forceinline__ float first_sum() const {
    return ptx::load_shared(ATTUNE_SHARED_AT(SharedStorage, check.first_sum));
  }

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
  __device__ __forceinline__ unsigned work_full(int slot) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.work_full, slot);
  }
  __device__ __forceinline__ unsigned work_empty(int slot) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.work_empty, slot);
  }
  __device__ __forceinline__ unsigned q_full(int stage = 0) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.q_full, stage);
  }
  __device__ __forceinline__ unsigned q_empty(int stage = 0) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.q_empty, stage);
  }
  __device__ __forceinline__ unsigned edge() const { return ATTUNE_SHARED_AT(SharedStorage, barriers.edge); }
  __device__ __forceinline__ unsigned raw_full(int stage) const {
    return ATTUNE_SHARED_AT(SharedStorage, barriers.raw) + stage * static_cast<int>(sizeof(RingBarriers));
  }
  __device__ __forceinline__ unsigned raw_empty(int stage) const {
    return raw_full(stage) + ATTUNE_OFFSET_OF(RingBarriers, empty);
  }

  // Of a tile in the ring of K, and in the ring of codes.
  __device__ __forceinline__ unsigned mask(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, masks, stage);
  }
  __device__ __forceinline__ unsigned raw_mask(int stage) const { return mask(Config::kStages + stage); }
  // Whether a tile of a math group had products that run_softcap_small() must not have. A warp may write that of the
  // next tile before another has read it.
  __device__ __forceinline__ unsigned over_cap(int group, int tile) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, over_cap, group, tile & 1);
  }
  // Of this math thread alone: what it has no registers for.
  __device__ __forceinline__ unsigned limits() const {
    return ATTUNE_SHARED_AT(SharedStorage, limits) + static_cast<int>(sizeof(uint4)) * math_thread();
  }
  __device__ __forceinline__ float* scales(int stage, bool values) const {
    TileScales& x = value_at<TileScales>(ATTUNE_OFFSET_OF(SharedStorage, scales), stage);
    return values ? x.values : x.keys;
  }
};

}  // namespace attune::prefill
