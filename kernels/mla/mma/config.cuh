// SPDX-License-Identifier: Apache-2.0
// The configuration of mla/mma.cu, its warp roles, named barriers and shared memory.
#pragma once

#include "common/operand.cuh"
#include "mla/mma/shared_bytes.h"
#include "mla/problem.cuh"
#include "mla/query_row.cuh"
#include "ptx/barrier.cuh"

namespace attune::mla {

struct MmaConfig {
  static constexpr int kRows = ATTUNE_ROWS, kKeys = ATTUNE_KEYS, kStages = ATTUNE_STAGES;
  static constexpr int kConsumerThreads = kernels::kMlaMmaConsumerThreads, kConsumerWarps = kConsumerThreads / 32;
  static constexpr int kThreads = kernels::mla_mma_threads(ProblemConfig::kProducer, kRows, kKeys);
  static constexpr bool kHasProducerWarps = kernels::mla_mma_has_producer_warps(kRows);
  static constexpr int kProducerThreads = kHasProducerWarps ? kThreads - kConsumerThreads : kThreads;
  // Groups of warps with at most 32 rows. Between two tiles a group waits for no other group.
  static constexpr int kGroups = kRows == 64 ? 2 : 1, kGroupRows = kRows / kGroups, kRowTiles = kGroupRows / 16;
  static constexpr int kGroupWarps = kConsumerWarps / kGroups, kGroupThreads = 32 * kGroupWarps;
  static constexpr int kChannelsOfWarp = ProblemConfig::kHeadDimV / kGroupWarps;  // channels of O in a warp
  // S: each warp has all rows of its group, a slice of the channels and, if there are enough warps, a part of the keys.
  static constexpr int kSlices = kernels::kMlaMmaSlices, kKeyParts = kGroupWarps / kSlices;
  static constexpr int kKeyTiles = kKeys / 8 / kKeyParts;                   // tiles of eight keys in a warp
  static constexpr int kBlocks = ProblemConfig::kHeadDimQk / 16 / kSlices;  // blocks of 16 channels in a slice
  static constexpr int kQRegisterBlocks = kernels::mla_mma_q_register_blocks(ProblemConfig::kHeadDimQk, kRows);
  // blocks of a slice whose queries are in shared memory, not in registers
  static constexpr int kQSharedBlocks = kBlocks - kQRegisterBlocks;
  using Layout = common::RowLayout<ProblemConfig::kHeadDimQk / 8>;
  using LayoutQ = common::RowLayout<kQSharedBlocks == 0 ? 1 : kSlices * kQSharedBlocks * 2>;
  using LayoutP = common::RowLayout<kKeys / 8>;
  static constexpr int kPackedPitch = kernels::mla_mma_packed_pitch(ProblemConfig::kProducer);
  static constexpr int kTiles = kernels::mla_mma_tiles(ProblemConfig::kProducer, kStages);
  // tiles whose flags are kept: more than can be copied, dequantized and in use at a time
  static constexpr int kFlags = 8;
  // P is multiplied by 2^kOffset until the epilogue, so that fp16 keeps the bits of small P. The deferred rescale may
  // make it larger by another 2^8.
  static constexpr int kOffset = ProblemConfig::kType == common::kFloat16 ? 7 : 0;

  static_assert(kRows == 16 || kRows == 32 || kRows == 64, "whole row tiles");
  static_assert(kKeys == 16 || kKeys == 32, "a tile has one or two k-steps of PV");
  static_assert(kStages >= kernels::mla_mma_fewest_stages(ProblemConfig::kProducer) && kStages + 2 < kFlags,
                "a tile is copied while the one before is multiplied");
  static_assert(!ProblemConfig::kTma, "threads copy rows one by one");
  static_assert(Layout::kPitch == kernels::mla_mma_pitch(ProblemConfig::kHeadDimQk), "host and device agree on a row");
};

struct MmaStorage {
  alignas(128) unsigned char q[MmaConfig::kQSharedBlocks == 0 ? 1 : MmaConfig::kRows]
                              [MmaConfig::kQSharedBlocks == 0 ? 128 : MmaConfig::LayoutQ::kPitch];
  alignas(128) unsigned char tiles[MmaConfig::kTiles][MmaConfig::kKeys][MmaConfig::Layout::kPitch];
  alignas(128) unsigned char codes[ProblemConfig::kDequant ? MmaConfig::kStages * MmaConfig::kKeys : 1]
                                  [ProblemConfig::kDequant ? MmaConfig::kPackedPitch : 16];
  // Partial sums of S: a lane's two keys of one row, or of two key tiles.
  alignas(16) float2 sums[MmaConfig::kGroups][MmaConfig::kSlices][2 * MmaConfig::kRowTiles][MmaConfig::kKeys / 8][32];
  alignas(128) unsigned char p[MmaConfig::kRows][MmaConfig::LayoutP::kPitch];
  alignas(16) unsigned char key_exists[MmaConfig::kFlags][MmaConfig::kKeys];  // whether a key has a row
  float factor[MmaConfig::kRows];                                           // the rescale factor of O
  union {
    int first_visible[MmaConfig::kRows];  // the first key that a row sees, if registers are scarce
    float out_factor[MmaConfig::kRows];   // the factor of the output, in the epilogue
  };
  int end_visible[MmaConfig::kRows == 16 ? 1 : MmaConfig::kRows];
  unsigned nonfinite[2];                                                    // a bit for each row that is recomputed
  WorkTile work;
  int head_tile, kv_head;
  kernels::ScheduleCheck check;
};
static_assert(sizeof(MmaStorage) <= kernels::mla_mma_shared_bytes(ProblemConfig::kProducer, ProblemConfig::kHeadDimQk,
                                                                  MmaConfig::kRows, MmaConfig::kKeys,
                                                                  MmaConfig::kStages),
              "the host asks for less shared memory than this");

// Named barriers.
struct MmaBarriers {
  static constexpr int kConsumers = 1, kGroup = 2, kFull = kGroup + MmaConfig::kGroups;
  static constexpr int kEmpty = kFull + MmaConfig::kTiles;
  static_assert(kEmpty + MmaConfig::kTiles <= 16, "a block has 16 barriers");
  __device__ __forceinline__ static void sync_consumers() {
    ptx::named_barrier_sync(kConsumers, MmaConfig::kConsumerThreads);
  }
  __device__ __forceinline__ static void sync_group(int group) {
    ptx::named_barrier_sync(kGroup + group, MmaConfig::kGroupThreads);
  }
  // Between producer warps, if there are any, and consumer warps: the tile is full; the tile is empty.
  __device__ __forceinline__ static void wait_full(int tile) {
    ptx::named_barrier_sync(kFull + tile, MmaConfig::kThreads);
  }
  __device__ __forceinline__ static void set_full(int tile) {
    ptx::named_barrier_arrive(kFull + tile, MmaConfig::kThreads);
  }
  __device__ __forceinline__ static void wait_empty(int tile) {
    ptx::named_barrier_sync(kEmpty + tile, MmaConfig::kThreads);
  }
  __device__ __forceinline__ static void set_empty(int tile) {
    ptx::named_barrier_arrive(kEmpty + tile, MmaConfig::kThreads);
  }
};

// threadIdx.x through a shuffle, so that it is opaque to the compiler: otherwise values that derive from it would stay
// in registers over all tiles.
__device__ __forceinline__ unsigned mma_thread() { return __shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x % 32); }
// A number that is the same in all lanes; the shuffle tells the compiler so.
__device__ __forceinline__ int mma_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
// The next buffer of a ring of `count`.
__device__ __forceinline__ int mma_next(int at, int count) { return at == count - 1 ? 0 : at + 1; }

using MmaKeyTiles = scheduler::KeyTiles<MmaConfig::kKeys>;
__device__ __forceinline__ Tile mma_tile_at(const WorkTile& t, int i) {
  return tile_at(t, MmaKeyTiles(t.num_cached, t.first_key, t.end_key), i);
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
  __device__ __forceinline__ QueryRow query(const WorkTileParams& p, const WorkTile& t) const {
    if (!exists) return {};
    return {p, t, token, head};
  }
};

// The first channel of block b of a slice. A slice has 128 channels of V, then 16 of the rope channels.
__device__ __forceinline__ int mma_channel_of(int slice, int b) {
  return b < 8 ? 128 * slice + 16 * b : ProblemConfig::kHeadDimV + 16 * slice;
}

}  // namespace attune::mla
