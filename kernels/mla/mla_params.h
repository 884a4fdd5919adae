// SPDX-License-Identifier: Apache-2.0
// What the host and the kernels of MLA share beside the parameters of prefill: how keys come, and sizes. Compiled by
// NVRTC and by the host's compiler; no standard headers.
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
constexpr int kMlaItems = 4;                    // numbers of work tiles that one block of a cluster tells the other

// The kernel of few rows (mla/few.cu): packed rows of queries of a block, warps that do the math, threads.
constexpr int kMlaFewRows = 16, kMlaFewMathWarps = 8, kMlaFewThreads = 384;

// Of cached rows, in that kernel and the next: their bytes; their distance in shared memory, such that the same 16
// bytes of eight rows lie in different banks; and tiles at a time.
struct MlaFewFormat {
  int row_bytes, pitch, stages;
};
ATTUNE_SHARED_FUNCTION MlaFewFormat mla_few_format(int loader, int head_dim_qk) {
  if (loader == kMlaCodes656) return {656, 656, 4};
  return {head_dim_qk * 2, head_dim_qk * 2 + 16, 3};
}

// The kernel of half a block of rows, or a quarter (mla/half.cu): at most 32 rows, or 16, over packed rows of 656
// bytes, by wgmma. Groups of channels with a scale each.
constexpr int kMlaHalfRows = 32, kMlaHalfGroups = 4, kMlaHalfThreads = 512;

}  // namespace attune::kernels
