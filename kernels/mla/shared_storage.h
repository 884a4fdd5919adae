// SPDX-License-Identifier: Apache-2.0
// The shared memory of a block of each MLA kernel, whose size the host asks for. Compiled by NVRTC and by the host's
// compiler; no standard headers. Addresses in it: mla/config.cuh, mla/m16/config.cuh, mla/swap_ab/config.cuh.
#pragma once

#include "mla/mla_params.h"
#include "tile/shared_array.h"

namespace attune::kernels {

// Beside a tile: a bit for each key that nobody sees, of keys 0 to 31 in the first half of the words, which are to be
// combined, and of the others in the second; the tile's first key; whether some rows see less than others.
template <int kMaskWords>
struct alignas(16) MlaTileMask {
  unsigned masked[kMaskWords];
  int start;
  unsigned needs_row_mask;
};

// Of mla/mla.cu. "full" says that data have come, "empty" that all who read them have.
struct alignas(16) MlaBarriers {
  Barrier k_full[kMlaStages][kMlaSlices], k_empty[kMlaStages][3];
  Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  Barrier q_full, q_empty;
  Barrier partial_full[4];  // of each loader warp alone
  Barrier item_full[kMlaItems];
};

// Maxima and sums of the two rows that four threads share, where the first of them had a piece of its weights.
struct alignas(64) MlaRowStats {
  float stats[2][2];
};

template <int kHeadDimQk, int kMaskWords>
struct MlaStorage {
  // Swizzled in atoms of 1,024 bytes: [chunks of 64 channels][rows or keys][128 bytes].
  alignas(1024) unsigned char q[kHeadDimQk / 64][kMlaChunkBytes];
  unsigned char k[kMlaStages][kHeadDimQk / 64][kMlaChunkBytes];
  union {
    // What a math thread hands to its twin of the other group.
    alignas(16) unsigned char p[4][128][16];
    MlaRowStats row_stats[2][32];  // [group]: at a work tile's end; other warps may still read their weights
  };
  float row_max_refs[2][kMlaBlockM];  // [group]
  int unmasked_tiles[2];              // [begin, end) of the work tile's tiles of which all rows see all keys
  alignas(8) int row_limits[kMlaBlockM][2];
  MlaTileMask<kMaskWords> masks[kMlaStages];
  alignas(16) unsigned items[kMlaItems];
  MlaBarriers barriers;
  ScheduleCheck check;
  using Slot = WorkSlot;
  Slot slots[kWorkSlots];
};

// Of the kernels whose blocks have fewer rows of queries: which keys of a tile are not there, a bit each; and, where
// rows are packed, what weights are multiplied with (mla/swap_ab/scale_units.cuh).
struct alignas(16) MlaCachedTileMask {
  unsigned masked[2];
  unsigned units[2];
};

// Of mla/few.cu.
template <int kStages, int kPitch>
struct MlaM16Storage {
  alignas(1024) unsigned char tiles[kStages][kMlaBlockN][kPitch];  // cached rows as they are
  alignas(128) unsigned char p[2][kMlaM16Rows][128];               // of all keys, in pieces of 16 bytes, swizzled
  float tile_row_max[2][kMlaM16Rows][kMlaM16MathWarps];
  float row_sums[kMlaM16Rows][kMlaM16MathWarps];
  MlaCachedTileMask masks[kStages];
  unsigned long long row_sources[kMlaBlockN];  // where the rows of the tile that is being copied lie
  struct alignas(16) {
    Barrier full[kStages], empty[kStages], row_max_full[2], p_full[2];
    Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  } barriers;
  ScheduleCheck check;
  using Slot = WorkSlot;
  Slot slots[kWorkSlots];
};

// Of mla/half.cu.
template <int kBlockM>
struct MlaSwapAbStorage {
  static constexpr MlaCachedRowFormat kFormat = mla_cached_row_format(kMlaDequant656, 576);
  static constexpr int kStages = kFormat.stages;

  alignas(1024) unsigned char tiles[kStages][kMlaBlockN][kFormat.pitch];
  alignas(1024) unsigned char q[576 / 64][kBlockM][128];                    // chunks of 64 channels
  alignas(1024) unsigned char p[kMlaScaleGroups][kBlockM][2 * kMlaBlockN];  // of each group of channels
  // After a work tile's tiles: sums of the eight warps that have scores; maximum and reference; bounds of the four
  // warps' outputs that have values, of either half of the channels; and of a new token, a row's product, then its
  // weight.
  float row_sums[kBlockM][8];
  float row_max[kBlockM][2];
  unsigned bounds[kBlockM][8];
  alignas(16) float token[kBlockM];
  float tile_row_max[kStages][kBlockM][4];    // of a tile's scores, one from each warp that has them
  float q_factors[kMlaScaleGroups][kBlockM];  // of the queries, to be undone
  // What outputs are to be multiplied with before a tile's values are added, and whether to: not 0 if some rows are.
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

// What the host asks for.
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
