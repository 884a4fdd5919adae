// SPDX-License-Identifier: Apache-2.0
// What mla/mma.cu is compiled for, and its shared memory.
#pragma once

#include "common/operand.cuh"
#include "mla/mma/shared_bytes.h"
#include "mla/problem.cuh"

namespace attune::mla {

struct MmaConfig {
  static constexpr int kRows = ATTUNE_ROWS, kKeys = ATTUNE_KEYS, kStages = ATTUNE_STAGES;
  static constexpr int kThreads = kernels::kMlaMmaThreads, kWarps = kThreads / 32;
  static constexpr int kRowTiles = kRows / 16;                         // all of them are in each warp's O
  static constexpr int kChannelsOfWarp = ProblemConfig::kHeadDimV / kWarps;   // of O
  // Warps that have S: a row tile, and some keys, of each. The others wait.
  static constexpr int kKeyWarps = kWarps / kRowTiles < kKeys / 8 ? kWarps / kRowTiles : kKeys / 8;
  static constexpr int kKeyTiles = kKeys / 8 / kKeyWarps;  // of eight keys, of a warp
  // With 64 rows two warps with the same keys sum two row tiles over half of the channels each, which reads a quarter
  // less of shared memory, and exchange the other's row tile.
  static constexpr int kPair = kRows == 64 ? 2 : 1;
  static constexpr int kLanes = kThreads / kKeys;          // threads that copy a row
  using Layout = common::RowLayout<ProblemConfig::kHeadDimQk / 8>;
  using LayoutP = common::RowLayout<kKeys / 8>;
  static constexpr int kPackedPitch = kernels::mla_mma_packed_pitch(ProblemConfig::kProducer);
  static constexpr int kTileBuffers = ProblemConfig::kDequant ? 1 : kStages;
  // P carries a factor of 2^kOffset until the epilogue, beside the 2^8 that deferred rescaling may add: fp16 keeps the
  // bits of small ones.
  static constexpr int kOffset = ProblemConfig::kType == common::kFloat16 ? 7 : 0;

  static_assert(kRows == 16 || kRows == 32 || kRows == 64, "whole row tiles for eight warps");
  static_assert(kKeys == 16 || kKeys == 32, "keys are the depth of whole products, and rows of whole warps");
  static_assert(kStages >= 2, "a tile is copied while the one before is multiplied");
  static_assert(!ProblemConfig::kTma, "threads copy rows one by one");
  static_assert(Layout::kPitch == kernels::mla_mma_pitch(ProblemConfig::kHeadDimQk), "host and device agree on a row");
};

struct MmaStorage {
  alignas(128) unsigned char q[MmaConfig::kRows][MmaConfig::Layout::kPitch];
  alignas(128) unsigned char tiles[MmaConfig::kTileBuffers][MmaConfig::kKeys][MmaConfig::Layout::kPitch];
  alignas(128) unsigned char codes[ProblemConfig::kDequant ? MmaConfig::kStages * MmaConfig::kKeys : 1]
                                  [ProblemConfig::kDequant ? MmaConfig::kPackedPitch : 16];
  union {
    alignas(128) unsigned char p[MmaConfig::kRows][MmaConfig::LayoutP::kPitch];
    float4 halves[MmaConfig::kPair == 2 ? MmaConfig::kWarps : 1][MmaConfig::kKeyTiles][32];  // of S, for the other warp
  };
  alignas(16) unsigned char is_there[MmaConfig::kStages][MmaConfig::kKeys];  // whether a key has a row
  float of_warps[MmaConfig::kKeyWarps][MmaConfig::kRows];  // a tile's row max; at the end the row sums
  float factor[MmaConfig::kRows];                          // of O: rescale; at the end that of the output
  float2 row_max[MmaConfig::kRows];                        // at the end: row_max and row_max_ref
  unsigned nonfinite[2];                                   // a bit for each row that is recomputed
  WorkTile work;
  int head_tile;
  kernels::ScheduleCheck check;
};
static_assert(sizeof(MmaStorage) <=
                  kernels::mla_mma_shared_bytes(ProblemConfig::kProducer, ProblemConfig::kHeadDimQk, MmaConfig::kRows,
                                                MmaConfig::kKeys, MmaConfig::kStages),
              "the host asks for less shared memory than this");

using MmaKeyTiles = scheduler::KeyTiles<MmaConfig::kKeys>;
__device__ __forceinline__ Tile mma_tile_at(const WorkTile& t, int i) {
  return tile_at(t, MmaKeyTiles(t.num_cached, t.first_key, t.end_key), i);
}
__device__ __forceinline__ int mma_kv_head(const WorkTileParams& p, const MmaStorage& shared) {
  return shared.head_tile * p.heads_of_tile / p.group;
}

// A row of the M block: its token in the sequence, and its query head.
struct MmaRow {
  int token, head;
  bool exists;
  __device__ __forceinline__ MmaRow(const WorkTileParams& p, const MmaStorage& shared, int row) {
    const int local = row / p.heads_of_tile;
    token = shared.work.token_begin + local;
    head = shared.head_tile * p.heads_of_tile + row - local * p.heads_of_tile;
    exists = local < shared.work.num_tokens;
  }
  __device__ __forceinline__ int position(const WorkTile& t) const { return t.num_keys - t.num_q + token; }
};

}  // namespace attune::mla
