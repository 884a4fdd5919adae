// SPDX-License-Identifier: Apache-2.0
// What the host and the kernels of MLA share beside the parameters of prefill: how keys come, and sizes. Compiled by
// NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "prefill/prefill_params.h"

namespace attune::kernels {

// How keys come to shared memory.
enum MlaProducer {
  kMlaTma = 0,         // the TMA copies boxes of rows
  kMlaGather = 1,      // threads copy rows of 16-bit elements, each from where a list or a table says
  kMlaDequant656 = 2,  // threads make 16-bit rows of those of the format
  kMlaDequant584 = 3
};

// Threads of a block: two groups of 128 do the math, the others bring keys. Packed rows of a tile are decoded by one
// warp for eight of them; a cluster's blocks have half of them each.
ATTUNE_SHARED_FUNCTION int mla_threads(int producer, int cluster) {
  return producer >= kMlaDequant656 && cluster == 1 ? 512 : 384;
}

constexpr int kMlaBlockM = 64, kMlaBlockN = 64, kMlaStages = 2;  // packed rows; keys of a tile; tiles at a time
constexpr int kMlaHeadDimV = 512;
constexpr int kMlaPartialStats = 8;               // words of a row of a part beside its outputs
constexpr int kMlaCombineThreads = 512;           // of a block that merges parts
constexpr int kMlaChunkBytes = kMlaBlockN * 128;  // of 64 channels of a tile, and of the queries
constexpr int kMlaSlices = 5;                     // of a tile that have a barrier each
constexpr int kMlaItems = 4;                      // numbers of work tiles that one block of a cluster tells the other

// The kernel of few rows (mla/few.cu): packed rows of queries of a block, warps that do the math, threads.
constexpr int kMlaM16Rows = 16, kMlaM16MathWarps = 8, kMlaM16Threads = 384;

// Of cached rows, in that kernel and the next: their bytes; their distance in shared memory, such that the same 16
// bytes of eight rows lie in different banks; and tiles at a time.
struct MlaCachedRowFormat {
  int row_bytes, pitch, stages;
};
ATTUNE_SHARED_FUNCTION MlaCachedRowFormat mla_cached_row_format(int producer, int head_dim_qk) {
  if (producer == kMlaDequant656) return {656, 656, 4};
  return {head_dim_qk * 2, head_dim_qk * 2 + 16, 3};
}

// The kernel of half a block of rows, or a quarter (mla/half.cu): at most 32 rows, or 16, over packed rows of 656
// bytes, by wgmma. Groups of channels with a scale each.
constexpr int kMlaSwapAbRows = 32, kMlaScaleGroups = 4, kMlaSwapAbThreads = 512;

}  // namespace attune::kernels
