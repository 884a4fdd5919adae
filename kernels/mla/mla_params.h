// SPDX-License-Identifier: Apache-2.0
// What the host and the MLA kernels share besides the parameters: producers and sizes. Compiled by NVRTC and by the
// host's compiler; no standard headers.
#pragma once

#include "common/work_tile_params.h"

namespace attune::kernels {

// How the rows of keys are brought to shared memory.
enum MlaProducer {
  kMlaTma = 0,         // TMA boxes
  kMlaGather = 1,      // cp.async of rows of 16-bit elements, found by a list or a page table
  kMlaDequant656 = 2,  // rows of the packed format, dequantized to bf16
  kMlaDequant584 = 3
};

// Threads of a block: two consumer warpgroups; the others are producers. A warp dequantizes eight rows of a tile; in a
// cluster each block has half of the rows.
ATTUNE_SHARED_FUNCTION int mla_threads(int producer, int cluster) {
  return producer >= kMlaDequant656 && cluster == 1 ? 512 : 384;
}

constexpr int kMlaBlockM = 64, kMlaBlockN = 64, kMlaStages = 2;  // packed rows; keys of a tile; stages
constexpr int kMlaHeadDimV = 512;
constexpr int kMlaPartialStats = 8;               // words of stats for each row of a partial output
constexpr int kMlaCombineThreads = 512;           // of a block
constexpr int kMlaChunkBytes = kMlaBlockN * 128;  // 64 channels of a tile, or of q
constexpr int kMlaSlices = 5;                     // channel slices of a tile
constexpr int kMlaTileIdxSlots = 4;               // ring of tile indices between the blocks of a cluster

// The m16 kernel (mla/m16.cu): rows of queries, consumer warps, threads.
constexpr int kMlaM16Rows = 16, kMlaM16ConsumerWarps = 8, kMlaM16Threads = 384;

// The format of cached rows in the m16 and swap-AB kernels: their bytes; their pitch in shared memory, which puts the
// same 16 bytes of eight rows into different banks; pipeline stages.
struct MlaCachedRowFormat {
  int row_bytes, pitch, stages;
};
ATTUNE_SHARED_FUNCTION MlaCachedRowFormat mla_cached_row_format(int producer, int head_dim_qk) {
  if (producer == kMlaDequant656) return {656, 656, 4};
  return {head_dim_qk * 2, head_dim_qk * 2 + 16, 3};
}

// The swap-AB kernel (mla/swap_ab.cu): at most 32 rows, or 16, over packed rows of 656 bytes; its scale groups; its
// threads.
constexpr int kMlaSwapAbRows = 32, kMlaScaleGroups = 4, kMlaSwapAbThreads = 512;

}  // namespace attune::kernels
