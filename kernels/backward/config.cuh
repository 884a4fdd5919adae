// SPDX-License-Identifier: Apache-2.0
// The compile-time configuration and the shared memory of the gradient kernel.
//
// A block has its own rows, of q (for dq) or of k (for dk and dv), and walks over tiles of the other side. `own` and
// `tile` are the two sides; on each, x is what scores are made of (q or k) and y the other operand (dout or v):
//
//   S = own x * tile x^T      dP = own y * tile y^T      dx += dS * tile x      dv += P * tile y (of keys alone)
#pragma once

#include "backward/rows.cuh"
#include "common/pipeline_state.cuh"
#include "common/shared_view.cuh"
#include "ptx/wgmma.cuh"

namespace attune::backward {

struct Config {
  static constexpr bool kOfKeys = ATTUNE_OF_KEYS != 0;
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kRows = kBackwardRows, kTile = ATTUNE_TILE, kStages = ATTUNE_STAGES;
  static constexpr int kMathGroups = kRows / 64, kMathWarps = 4 * kMathGroups, kThreads = 128 + 32 * kMathWarps;
  static constexpr int kProducerRegisters = 24, kMathRegisters = 240;
  static constexpr ptx::Type kMmaType = ATTUNE_TYPE == common::kBFloat16 ? ptx::Type::kBf16 : ptx::Type::kF16;
  // Lines of 64 channels, steps of 16, and channels of the accumulators.
  static constexpr int kLinesX = (kHeadDimQk + 63) / 64, kLinesY = (kHeadDimV + 63) / 64;
  static constexpr int kStepsX = (kHeadDimQk + 15) / 16, kStepsY = (kHeadDimV + 15) / 16;
  static constexpr int kChannelsX = (kHeadDimQk + 31) / 32 * 32, kChannelsY = (kHeadDimV + 31) / 32 * 32;
  static constexpr int kTileBytes = (kLinesX + kLinesY) * kTile * 128 + (kOfKeys ? kTile * 8 : 0);
  static_assert(ATTUNE_TYPE == common::kBFloat16 || ATTUNE_TYPE == common::kFloat16, "what wgmma takes");
  static_assert(kTile % 32 == 0 && kTile <= 128, "wgmma's columns; a TMA box");
  static_assert(kHeadDimQk <= 128 && kHeadDimV <= 128, "the accumulators would not fit the registers");
};

// Tiles are swizzled in atoms of 1,024 bytes: [lines of channels][rows][128 bytes].
struct SharedStorage {
  alignas(1024) unsigned char own_x[Config::kLinesX * Config::kRows * 128];
  unsigned char own_y[Config::kLinesY * Config::kRows * 128];
  unsigned char tile_x[Config::kStages][Config::kLinesX * Config::kTile * 128];
  unsigned char tile_y[Config::kStages][Config::kLinesY * Config::kTile * 128];
  RowStats stats[Config::kStages][Config::kTile];  // of a tile of queries
  kernels::Barrier own_full, full[Config::kStages], empty[Config::kStages];
};
static_assert(sizeof(SharedStorage) == kernels::backward_shared_bytes(Config::kHeadDimQk, Config::kHeadDimV,
                                                                      Config::kTile, Config::kStages),
              "the host asks for another size");

struct Smem {
  unsigned base;
  __device__ __forceinline__ explicit Smem(unsigned char* shared) : base(ptx::shared_address(shared)) {}
  __device__ __forceinline__ unsigned own_x() const { return ATTUNE_SHARED_AT(SharedStorage, own_x); }
  __device__ __forceinline__ unsigned own_y() const { return ATTUNE_SHARED_AT(SharedStorage, own_y); }
  __device__ __forceinline__ unsigned tile_x(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, tile_x, i); }
  __device__ __forceinline__ unsigned tile_y(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, tile_y, i); }
  __device__ __forceinline__ unsigned stats(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, stats, i); }
  __device__ __forceinline__ unsigned own_full() const { return ATTUNE_SHARED_AT(SharedStorage, own_full); }
  __device__ __forceinline__ unsigned full(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, full, i); }
  __device__ __forceinline__ unsigned empty(int i) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, empty, i); }
};

// What a block of threads has to do.
struct Work {
  SequenceInfo s;
  int batch, head;  // head: of the own side
  int begin, end;   // own rows
  int first, tiles;  // the first row of the first tile, even; tiles of each head
  int heads;         // of the tile side: the query heads of a KV head, or 1

  // Rows that an own row sees.
  __device__ __forceinline__ Span seen_by(const BackwardParams& p, int row) const {
    if (row >= end) return {0, 0};
    return Config::kOfKeys ? queries_of_key(p, s, row) : keys_of_query(p, s, row);
  }
};

__device__ __forceinline__ Work work_of(const BackwardParams& p, const BackwardTile& tile, int head) {
  Work w;
  w.s = read_sequence(p, tile.batch);
  w.batch = tile.batch, w.head = head, w.begin = tile.begin;
  w.end = min(tile.begin + Config::kRows, Config::kOfKeys ? key_extent(p, tile.batch) : w.s.num_q);
  const int last = Config::kOfKeys ? min(w.end, w.s.num_keys) - 1 : w.end - 1;  // that sees something
  w.heads = Config::kOfKeys ? p.group : 1;
  w.first = w.tiles = 0;
  if (last < w.begin) return w;
  const int begin = w.seen_by(p, w.begin).begin, end = w.seen_by(p, last).end;
  w.first = begin / 2 * 2;
  if (end > begin) w.tiles = (end - w.first + Config::kTile - 1) / Config::kTile;
  return w;
}

}  // namespace attune::backward
