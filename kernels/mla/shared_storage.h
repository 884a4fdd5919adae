// SPDX-License-Identifier: Apache-2.0
// The shared memory of a block of each MLA kernel, whose size the host asks for. Compiled by NVRTC and by the host's
// compiler; no standard headers. Addresses in it: mla/config.cuh, mla/m16/config.cuh, mla/swap_ab/config.cuh.
#pragma once

#include "mla/mla_params.h"
#include "tile/shared_array.h"

namespace attune::kernels {

// Beside a tile: a bit for each key that nobody sees, of keys 0 to 31 in the first half of the words, which are to be
// combined, and of the others in the second; the tile's first key; whether some rows see less than others.
template <int kHiddenWords>
struct alignas(16) MlaTileNote {
  unsigned hidden[kHiddenWords];
  int start;
  unsigned edge;
};

// Of mla/mla.cu. "full" says that data have come, "empty" that all who read them have.
struct alignas(16) MlaBarriers {
  Barrier k_full[kMlaStages][kMlaParts], k_empty[kMlaStages][3];
  Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  Barrier q_full, q_empty;
  Barrier edge[4];  // of each loader warp alone
  Barrier item_full[kMlaItems];
};

// Maxima and sums of the two rows that four threads share, where the first of them had a piece of its weights.
struct alignas(64) MlaRowStats {
  float stats[2][2];
};

template <int kHeadDimQk, int kHiddenWords>
struct MlaStorage {
  // Swizzled in atoms of 1,024 bytes: [chunks of 64 channels][rows or keys][128 bytes].
  alignas(1024) unsigned char q[kHeadDimQk / 64][kMlaChunkBytes];
  unsigned char k[kMlaStages][kHeadDimQk / 64][kMlaChunkBytes];
  union {
    // What a math thread hands to its twin of the other group.
    alignas(16) unsigned char weights[4][128][16];
    MlaRowStats row_stats[2][32];  // [group]: at a work tile's end; other warps may still read their weights
  };
  float references[2][kMlaRowsOfBlock];  // [group]
  int plain_tiles[2];                    // [begin, end) of the work tile's tiles of which all rows see all keys
  alignas(8) int limits[kMlaRowsOfBlock][2];
  MlaTileNote<kHiddenWords> notes[kMlaStages];
  alignas(16) unsigned items[kMlaItems];
  MlaBarriers barriers;
  ScheduleCheck check;
  using Slot = WorkSlot;
  Slot slots[kWorkSlots];
};

// Of the kernels whose blocks have fewer rows of queries: which keys of a tile are not there, a bit each; and, where
// rows are packed, what weights are multiplied with (mla/swap_ab/scale_units.cuh).
struct alignas(16) MlaFewNote {
  unsigned absent[2];
  unsigned units[2];
};

// Of mla/few.cu.
template <int kStages, int kPitch>
struct MlaFewStorage {
  alignas(1024) unsigned char tiles[kStages][kMlaKeys][kPitch];  // cached rows as they are
  alignas(128) unsigned char weights[2][kMlaFewRows][128];       // of all keys, in pieces of 16 bytes, swizzled
  float maxima[2][kMlaFewRows][kMlaFewMathWarps];
  float sums[kMlaFewRows][kMlaFewMathWarps];
  MlaFewNote notes[kStages];
  unsigned long long sources[kMlaKeys];  // where the rows of the tile that is being copied lie
  struct alignas(16) {
    Barrier full[kStages], empty[kStages], maxima_full[2], weights_full[2];
    Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  } barriers;
  ScheduleCheck check;
  using Slot = WorkSlot;
  Slot slots[kWorkSlots];
};

// Of mla/half.cu.
template <int kRows>
struct MlaHalfStorage {
  static constexpr MlaFewFormat kFormat = mla_few_format(kMlaCodes656, 576);
  static constexpr int kStages = kFormat.stages;

  alignas(1024) unsigned char tiles[kStages][kMlaKeys][kFormat.pitch];
  alignas(1024) unsigned char q[576 / 64][kRows][128];                       // chunks of 64 channels
  alignas(1024) unsigned char weights[kMlaHalfGroups][kRows][2 * kMlaKeys];  // of each group of channels
  // After a work tile's tiles: sums of the eight warps that have scores; maximum and reference; bounds of the four
  // warps' outputs that have values, of either half of the channels; and of a new token, a row's product, then its
  // weight.
  float sums[kRows][8];
  float state[kRows][2];
  unsigned bounds[kRows][8];
  alignas(16) float token[kRows];
  float maxima[kStages][kRows][4];       // of a tile's scores, one from each warp that has them
  float factors[kMlaHalfGroups][kRows];  // of the queries, to be undone
  // What outputs are to be multiplied with before a tile's values are added, and whether to: not 0 if some rows are.
  alignas(16) float lowered[kRows];
  alignas(16) unsigned changes;
  MlaFewNote notes[kStages];
  unsigned long long sources[kMlaKeys];
  struct alignas(16) {
    Barrier full[kStages], empty[kStages], maxima_full[kStages], weights_full, weights_empty;
    Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  } barriers;
  ScheduleCheck check;
  using Slot = WorkSlot;
  Slot slots[kWorkSlots];
};

// What the host asks for.
ATTUNE_SHARED_FUNCTION int mla_shared_bytes(int loader, int head_dim_qk) {
  const bool boxes = loader == kMlaBoxes;
  if (head_dim_qk == 512) return static_cast<int>(boxes ? sizeof(MlaStorage<512, 2>) : sizeof(MlaStorage<512, 8>));
  return static_cast<int>(boxes ? sizeof(MlaStorage<576, 2>) : sizeof(MlaStorage<576, 8>));
}
ATTUNE_SHARED_FUNCTION int mla_few_shared_bytes(int head_dim_qk) {
  constexpr MlaFewFormat k512 = mla_few_format(kMlaRows, 512), k576 = mla_few_format(kMlaRows, 576);
  return static_cast<int>(head_dim_qk == 512 ? sizeof(MlaFewStorage<k512.stages, k512.pitch>)
                                             : sizeof(MlaFewStorage<k576.stages, k576.pitch>));
}
ATTUNE_SHARED_FUNCTION int mla_half_shared_bytes(int rows) {
  return static_cast<int>(rows == 16 ? sizeof(MlaHalfStorage<16>) : sizeof(MlaHalfStorage<32>));
}

}  // namespace attune::kernels
