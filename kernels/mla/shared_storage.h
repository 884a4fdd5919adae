// SPDX-License-Identifier: Apache-2.0
// The shared memory of each MLA kernel; the host uses its sizeof. Shared addresses: mla/config.cuh, mla/m16/config.cuh,
// mla/swap_ab/config.cuh. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "mla/mla_params.h"

namespace attune::kernels {

// A tile's mask: a bit for each key that no row sees. The first half of the words is for keys 0 to 31 (they are ORed),
// the second for the others. Then the tile's first key, and whether rows see different keys.
template <int kMaskWords>
struct alignas(16) MlaTileMask {
  unsigned masked[kMaskWords];
  int start;
  unsigned needs_row_mask;
};

// Of mla/mla.cu. full: the data have arrived; empty: all readers are done.
struct alignas(16) MlaBarriers {
  Barrier k_full[kMlaStages][kMlaSlices], k_empty[kMlaStages][3];
  Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  Barrier q_full, q_empty;
  Barrier partial_full[4];  // one for each producer warp alone, for tiles that are partly invalid
  Barrier tile_idx_full[kMlaTileIdxSlots];
};

// row_max and row_sum of the two rows that four threads share. They overlay the first thread's P.
struct alignas(64) MlaRowStats {
  float stats[2][2];
};

template <int kHeadDimQk, int kMaskWords>
struct MlaStorage {
  // In swizzle atoms of 1,024 bytes: [chunks of 64 channels][rows or keys][128 bytes].
  alignas(1024) unsigned char q[kHeadDimQk / 64][kMlaChunkBytes];
  unsigned char k[kMlaStages][kHeadDimQk / 64][kMlaChunkBytes];
  union {
    // P, from each consumer thread to the same thread of the other warpgroup.
    alignas(16) unsigned char p[4][128][16];
    MlaRowStats row_stats[2][32];  // [warpgroup]: written at the end, when other warps may still read their P
  };
  float row_max_refs[2][kMlaBlockM];  // [warpgroup]
  int unmasked_tiles[2];              // [begin, end) of the work tile's tiles of which all rows see all keys
  alignas(8) int row_limits[kMlaBlockM][2];
  MlaTileMask<kMaskWords> masks[kMlaStages];
  alignas(16) unsigned tile_idx[kMlaTileIdxSlots];
  MlaBarriers barriers;
  ScheduleCheck check;
  using Slot = WorkSlot;
  Slot slots[kWorkSlots];
};

// A tile's mask in the m16 and swap-AB kernels: a bit for each masked key; for packed rows, also the factors of P
// (mla/swap_ab/scale_units.cuh).
struct alignas(16) MlaCachedTileMask {
  unsigned masked[2];
  unsigned units[2];
};

// Of mla/m16.cu.
template <int kStages, int kPitch>
struct MlaM16Storage {
  alignas(1024) unsigned char tiles[kStages][kMlaBlockN][kPitch];  // cached rows, unchanged
  alignas(128) unsigned char p[2][kMlaM16Rows][128];               // P of all keys, in swizzled vectors of 16 bytes
  float tile_row_max[2][kMlaM16Rows][kMlaM16ConsumerWarps];
  float row_sums[kMlaM16Rows][kMlaM16ConsumerWarps];
  MlaCachedTileMask masks[kStages];
  unsigned long long row_sources[kMlaBlockN];  // addresses of the rows that are being copied
  struct alignas(16) {
    Barrier full[kStages], empty[kStages], row_max_full[2], p_full[2];
    Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  } barriers;
  ScheduleCheck check;
  using Slot = WorkSlot;
  Slot slots[kWorkSlots];
};

// Of mla/swap_ab.cu.
template <int kBlockM>
struct MlaSwapAbStorage {
  static constexpr MlaCachedRowFormat kFormat = mla_cached_row_format(kMlaDequant656, 576);
  static constexpr int kStages = kFormat.stages;

  alignas(1024) unsigned char tiles[kStages][kMlaBlockN][kFormat.pitch];
  alignas(1024) unsigned char q[576 / 64][kBlockM][128];                    // chunks of 64 channels
  alignas(1024) unsigned char p[kMlaScaleGroups][kBlockM][2 * kMlaBlockN];  // of each scale group
  // After the last tile: row sums of the eight softmax warps; row_max and row_max_ref; bounds of O of the four PV
  // warps, for each half of the channels. For a new token: S of a row, then P.
  float row_sums[kBlockM][8];
  float row_max[kBlockM][2];
  unsigned bounds[kBlockM][8];
  alignas(16) float token[kBlockM];
  float tile_row_max[kStages][kBlockM][4];    // of a tile, one for each warp
  float q_factors[kMlaScaleGroups][kBlockM];  // inverse factors of q
  // O's rescale factors before a tile is added; any_rescale is not 0 if one of them is needed.
  alignas(16) float rescale[kBlockM];
  alignas(16) unsigned any_rescale;
  MlaCachedTileMask masks[kStages];
  unsigned long long row_sources[kMlaBlockN];
  struct alignas(16) {
    Barrier full[kStages], empty[kStages], row_max_full[kStages], p_full, p_empty;
    Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  } barriers;
  ScheduleCheck check;
  using Slot = WorkSlot;
  Slot slots[kWorkSlots];
};

// The size of shared memory that the host asks for.
ATTUNE_SHARED_FUNCTION int mla_shared_bytes(int producer, int head_dim_qk) {
  const bool tma = producer == kMlaTma;
  if (head_dim_qk == 512) return static_cast<int>(tma ? sizeof(MlaStorage<512, 2>) : sizeof(MlaStorage<512, 8>));
  return static_cast<int>(tma ? sizeof(MlaStorage<576, 2>) : sizeof(MlaStorage<576, 8>));
}
ATTUNE_SHARED_FUNCTION int mla_m16_shared_bytes(int head_dim_qk) {
  constexpr MlaCachedRowFormat k512 = mla_cached_row_format(kMlaGather, 512),
                               k576 = mla_cached_row_format(kMlaGather, 576);
  return static_cast<int>(head_dim_qk == 512 ? sizeof(MlaM16Storage<k512.stages, k512.pitch>)
                                             : sizeof(MlaM16Storage<k576.stages, k576.pitch>));
}
ATTUNE_SHARED_FUNCTION int mla_swap_ab_shared_bytes(int rows) {
  return static_cast<int>(rows == 16 ? sizeof(MlaSwapAbStorage<16>) : sizeof(MlaSwapAbStorage<32>));
}

}  // namespace attune::kernels
