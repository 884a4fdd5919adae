// SPDX-License-Identifier: Apache-2.0
// What the host and the kernels of MLA share beside the parameters of prefill: how keys come, and the size of shared
// memory. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "prefill/prefill_params.h"

namespace attune::kernels {

// How keys come to shared memory.
enum MlaLoader {
  kMlaBoxes = 0,     // the TMA copies boxes of rows
  kMlaRows = 1,      // threads copy rows of 16-bit elements, each from where a list or a table says
  kMlaCodes656 = 2,  // threads make 16-bit rows of those of the format
  kMlaCodes584 = 3
};

// Threads of a block: two groups of 128 do the math, the others bring keys. Packed rows of a tile are decoded by one
// warp for eight of them; a cluster's blocks have half of them each.
ATTUNE_SHARED_FUNCTION int mla_threads(int loader, int cluster) {
  return loader >= kMlaCodes656 && cluster == 1 ? 512 : 384;
}

constexpr int kMlaRowsOfBlock = 64, kMlaKeys = 64, kMlaStages = 2;  // packed rows; keys of a tile; tiles at a time
constexpr int kMlaHeadDimV = 512;
constexpr int kMlaPartStats = 8;       // words of a row of a part beside its outputs
constexpr int kMlaMergeThreads = 512;  // of a block that merges parts
constexpr int kMlaChunkBytes = kMlaKeys * 128;  // of 64 channels of a tile, and of the queries
constexpr int kMlaParts = 5;                    // of a tile that have a barrier each
constexpr int kMlaItems = 4;                    // numbers of tasks that one block of a cluster tells the other
constexpr int kMlaNoteBytes = 48;               // what lies beside a tile of keys

// Dynamic shared memory of a block; bytes.
struct MlaShared {
  int q, k, weights, references, rows, limits, notes, items, barriers, tasks, total;
};
ATTUNE_SHARED_FUNCTION MlaShared mla_shared(int head_dim_qk) {
  const int tile = head_dim_qk / 64 * kMlaChunkBytes;
  MlaShared s{};
  s.k = s.q + tile;
  s.weights = s.k + kMlaStages * tile;
  s.references = s.weights + kMlaKeys * kMlaRowsOfBlock * 2;  // [2 groups][rows]
  s.rows = s.references + 2 * kMlaRowsOfBlock * 4;            // of packed rows: which tiles all rows of a block see
  s.limits = s.rows + kMlaKeys * 8;                           // [rows][2]
  s.notes = s.limits + kMlaRowsOfBlock * 8;                   // [stages]
  s.items = s.notes + kMlaStages * kMlaNoteBytes;             // [slots]
  s.barriers = s.items + align_up(kMlaItems * 4, 16);
  s.tasks = s.barriers + align_up((kMlaStages * (kMlaParts + 3) + 2 * kTaskSlots + 2 + 4 + kMlaItems) * 8, 16);
  s.total = s.tasks + kTaskSlots * (static_cast<int>(sizeof(Task)) + 16);
  return s;
}

// The kernel of few rows (mla/few.cu): packed rows of queries of a block, warps that do the math, threads.
constexpr int kMlaFewRows = 16, kMlaFewMathWarps = 8, kMlaFewThreads = 384;
constexpr int kMlaFewNoteBytes = 16;  // what lies beside a tile

// What it makes of cached rows: their bytes; their distance in shared memory, such that the same 16 bytes of eight rows
// lie in different banks; groups of channels, with a scale each; and tiles at a time.
struct MlaFewFormat {
  int row_bytes, pitch, groups, stages;
  int rope_blocks;  // of 16 channels that are not codes, beside codes
};
ATTUNE_SHARED_FUNCTION MlaFewFormat mla_few_format(int loader, int head_dim_qk) {
  if (loader == kMlaCodes656) return {656, 656, 4, 5, 4};
  return {head_dim_qk * 2, head_dim_qk * 2 + 16, 1, 3, 0};
}

// Dynamic shared memory of one of its blocks; bytes.
struct MlaFewShared {
  int tiles, weights, rope, maxima, sums, factors, notes, barriers, tasks, total;
};
ATTUNE_SHARED_FUNCTION MlaFewShared mla_few_shared(const MlaFewFormat& f) {
  MlaFewShared s{};
  s.weights = s.tiles + f.stages * kMlaKeys * f.pitch;                // [2][groups][rows][keys]; queries on their way
  s.rope = s.weights + 2 * f.groups * kMlaFewRows * kMlaKeys * 2;     // of queries: [blocks][lanes][4]
  s.maxima = s.rope + f.rope_blocks * 512;                            // [2][rows][warps]
  s.sums = s.maxima + 2 * kMlaFewRows * kMlaFewMathWarps * 4;         // [rows][warps]
  s.factors = s.sums + kMlaFewRows * kMlaFewMathWarps * 4;            // [rows][groups]
  s.notes = s.factors + kMlaFewRows * f.groups * 4;                   // [stages]
  s.barriers = s.notes + f.stages * kMlaFewNoteBytes;
  s.tasks = s.barriers + align_up((2 * f.stages + 4 + 2 * kTaskSlots) * 8, 16);
  s.total = s.tasks + kTaskSlots * (static_cast<int>(sizeof(Task)) + 16);
  return s;
}

// The kernel of half a block of rows (mla/half.cu): 17 to 32 rows over packed rows of 656 bytes, by wgmma. Tiles at a
// time; bytes of 64 channels of the queries, and of the weights of a tile against one group's scales.
constexpr int kMlaHalfRows = 32, kMlaHalfStages = 4, kMlaHalfGroups = 4;
constexpr int kMlaHalfChunkBytes = kMlaHalfRows * 128;

// Dynamic shared memory of one of its blocks; bytes.
struct MlaHalfShared {
  int tiles, q, weights, exchanged, maxima, factors, lowered, changes, notes, barriers, tasks, total;
};
ATTUNE_SHARED_FUNCTION MlaHalfShared mla_half_shared() {
  MlaHalfShared s{};
  s.q = s.tiles + kMlaHalfStages * kMlaKeys * 656;                         // [chunks][rows][64 channels]
  s.weights = s.q + 576 / 64 * kMlaHalfChunkBytes;                         // [groups][rows][keys]
  s.exchanged = s.weights + kMlaHalfGroups * kMlaHalfRows * kMlaKeys * 2;  // [2 groups of warps][2][threads][4]
  s.maxima = s.exchanged + 2 * 2 * 128 * 16;                               // [2][rows][4 warps]
  s.factors = s.maxima + 2 * kMlaHalfRows * 16;                            // [groups][rows]
  s.lowered = s.factors + kMlaHalfGroups * kMlaHalfRows * 4;               // [rows]
  s.changes = s.lowered + kMlaHalfRows * 4;                                // [2 groups of warps]
  s.notes = s.changes + 16;                                                // [stages]
  s.barriers = s.notes + kMlaHalfStages * kMlaFewNoteBytes;
  s.tasks = s.barriers + align_up((2 * kMlaHalfStages + 6 + 2 * kTaskSlots) * 8, 16);
  s.total = s.tasks + kTaskSlots * (static_cast<int>(sizeof(Task)) + 16);
  return s;
}

}  // namespace attune::kernels
