// SPDX-License-Identifier: Apache-2.0
// A specialisation of prefill_mma.cu, from the macros that the host compiles it with, and its shared memory.
#pragma once

#include "common/operand.cuh"
#include "common/work_tile_params.h"
#include "prefill/mma/shared_bytes.h"

namespace attune::prefill_mma {

using kernels::WorkTile;
using kernels::WorkTileParams;

struct Config {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kType = ATTUNE_TYPE, kOutType = ATTUNE_OUT_TYPE;  // attune_dtype
  static constexpr unsigned kScore = ATTUNE_SCORE, kMask = ATTUNE_MASK;
  static constexpr bool kCached = ATTUNE_CACHED != 0, kDense = ATTUNE_DENSE != 0;
  static constexpr int kRowTiles = ATTUNE_ROW_TILES;  // of 16 rows, of a warp
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kRowTiles * kWarps, kKeys = 64;
  static constexpr int kBlocksQk = (kHeadDimQk + 15) / 16, kBlocksV = (kHeadDimV + 15) / 16;  // of 16 channels
  using LayoutK = common::RowLayout<kernels::mma_chunks(kHeadDimQk)>;  // of Q too
  using LayoutV = common::RowLayout<kernels::mma_chunks(kHeadDimV)>;
  // P may exceed 1 by this power of two before O is rescaled.
  static constexpr float kRescaleThreshold = 8;
  // P carries a factor of 2^kMaxOffset until the epilogue: fp16 drops numbers below 2^-25, so they start as high as its
  // range allows.
  static constexpr int kMaxOffset = kType == common::kFloat16 ? 7 : 0;

  static_assert(kType == common::kFloat16 || kType == common::kBFloat16, "16-bit rows");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "rows are whole chunks");
  static_assert(LayoutK::kPitch == kernels::mma_pitch(kHeadDimQk), "host and device agree on a row");
};

struct SharedStorage {
  alignas(128) unsigned char q[Config::kRows * Config::LayoutK::kPitch];
  alignas(128) unsigned char k[Config::kKeys * Config::LayoutK::kPitch];
  alignas(128) unsigned char v[Config::kKeys * Config::LayoutV::kPitch];
  WorkTile work;  // in registers these would push others out
  int head, kv_head;
  // A bit for each key of the tile: whether its pages exist, and whether half of its value has a NaN or infinity.
  unsigned found[2], special[2][2];
};
static_assert(sizeof(SharedStorage) <= kernels::mma_shared_bytes(Config::kRows, Config::kKeys, Config::kHeadDimQk,
                                                                 Config::kHeadDimV),
              "the host asks for less shared memory than this");

}  // namespace attune::prefill_mma
