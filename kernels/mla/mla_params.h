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

// Of cached rows, in that kernel and the next: their bytes; their distance in shared memory, such that the same 16
// bytes of eight rows lie in different banks; and tiles at a time.
struct MlaFewFormat {
  int row_bytes, pitch, stages;
};
ATTUNE_SHARED_FUNCTION MlaFewFormat mla_few_format(int loader, int head_dim_qk) {
  if (loader == kMlaCodes656) return {656, 656, 4};
  return {head_dim_qk * 2, head_dim_qk * 2 + 16, 3};
}

// Dynamic shared memory of one of the blocks of few rows; bytes.
struct MlaFewShared {
  int tiles, weights, maxima, sums, notes, sources, barriers, tasks, total;
};
ATTUNE_SHARED_FUNCTION MlaFewShared mla_few_shared(const MlaFewFormat& f) {
  MlaFewShared s{};
  s.weights = s.tiles + f.stages * kMlaKeys * f.pitch;         // [2][rows][keys]
  s.maxima = s.weights + 2 * kMlaFewRows * kMlaKeys * 2;       // [2][rows][warps]
  s.sums = s.maxima + 2 * kMlaFewRows * kMlaFewMathWarps * 4;  // [rows][warps]
  s.notes = s.sums + kMlaFewRows * kMlaFewMathWarps * 4;       // [stages]
  s.sources = s.notes + f.stages * kMlaFewNoteBytes;  // [keys]
  s.barriers = s.sources + kMlaKeys * 8;
  s.tasks = s.barriers + align_up((2 * f.stages + 4 + 2 * kTaskSlots) * 8, 16);
  s.total = s.tasks + kTaskSlots * (static_cast<int>(sizeof(Task)) + 16);
  return s;
}

// The kernel of half a block of rows, or a quarter (mla/half.cu): at most 32 rows, or 16, over packed rows of 656
// bytes, by wgmma. Groups of channels with a scale each.
constexpr int kMlaHalfRows = 32, kMlaHalfGroups = 4, kMlaHalfThreads = 512;

// Dynamic shared memory of one of its blocks; bytes.
struct MlaHalfShared {
  int tiles, q, weights, ends, maxima, factors, lowered, changes, notes, sources, barriers, tasks, total;
};
ATTUNE_SHARED_FUNCTION MlaHalfShared mla_half_shared(int rows) {
  const MlaFewFormat f = mla_few_format(kMlaCodes656, 576);
  MlaHalfShared s{};
  s.q = s.tiles + f.stages * kMlaKeys * f.pitch;              // [chunks][rows][64 channels]
  s.weights = s.q + 576 / 64 * rows * 128;                    // [groups][rows][keys]
  s.ends = s.weights + kMlaHalfGroups * rows * kMlaKeys * 2;  // [rows][19 words]
  s.maxima = s.ends + align_up(rows * 76, 16);                // [stages][rows][4 warps]
  s.factors = s.maxima + f.stages * rows * 16;                // [groups][rows]
  s.lowered = s.factors + kMlaHalfGroups * rows * 4;          // [rows]
  s.changes = s.lowered + rows * 4;
  s.notes = s.changes + 16;  // [stages]
  s.sources = s.notes + f.stages * kMlaFewNoteBytes;  // [keys]
  s.barriers = s.sources + kMlaKeys * 8;
  s.tasks = s.barriers + align_up((3 * f.stages + 2 + 2 * kTaskSlots) * 8, 16);
  s.total = s.tasks + kTaskSlots * (static_cast<int>(sizeof(Task)) + 16);
  return s;
}

}  // namespace attune::kernels
