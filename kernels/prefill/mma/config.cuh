// SPDX-License-Identifier: Apache-2.0
// The configuration of prefill_mma.cu or prefill_fp32_mma.cu, from the macros that the host compiles it with.
#pragma once

#include "common/operand.cuh"
#include "common/work_tile_params.h"
#include "prefill/mma/shared_bytes.h"

#ifndef ATTUNE_CACHE_TYPE
#define ATTUNE_CACHE_TYPE ATTUNE_TYPE
#endif
#ifndef ATTUNE_TOKEN_SCALES
#define ATTUNE_TOKEN_SCALES 0
#endif
#ifndef ATTUNE_XPACKED
#define ATTUNE_XPACKED 0
#endif
#ifndef ATTUNE_KEYS
#define ATTUNE_KEYS 64
#endif
#ifndef ATTUNE_WARPS
#define ATTUNE_WARPS 4
#endif

namespace attune::prefill_mma {

using kernels::WorkTile;
using kernels::WorkTileParams;

struct Config {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kType = ATTUNE_TYPE, kCacheType = ATTUNE_CACHE_TYPE, kOutType = ATTUNE_OUT_TYPE;  // attune_dtype
  static constexpr unsigned kScore = ATTUNE_SCORE, kMask = ATTUNE_MASK;
  static constexpr bool kCached = ATTUNE_CACHED != 0, kDense = ATTUNE_DENSE != 0;
  // The cache has 8 bits. Its codes become 16-bit numbers, exactly, and the scales are applied to scores, P and O
  // (dequant.cuh): a scale of all keys multiplies products and O, token scales multiply the columns of S and P.
  static constexpr bool kQuantized = kCached && kCacheType != kType && kType != common::kFloat32,
                        kTokenScales = kQuantized && ATTUNE_TOKEN_SCALES != 0;
  // fp16 lacks the range of P times a scale, so such a P is the sum of two bf16 numbers, and V is bf16.
  static constexpr int kPParts = kTokenScales && kType == common::kFloat16 ? 2 : 1;
  static constexpr int kCodeTypeV = kPParts == 2 ? common::kBFloat16 : kType;
  // The cache is x-packed. Its tiles of V are stored by channels (xpacked.cuh).
  static constexpr bool kXpacked = kCached && ATTUNE_XPACKED != 0;
  static constexpr int kRowTiles = ATTUNE_ROW_TILES;  // tiles of 16 rows in a warp
  static constexpr int kWarps = ATTUNE_WARPS, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kRowTiles * kWarps, kKeys = ATTUNE_KEYS;
  static constexpr int kKeyWords = (kKeys + 31) / 32;  // words of 32 key bits in a tile
  // One page id of a tile serves this many rows.
  static constexpr int kRowsOfId =
      kKeys / kernels::mma_page_ids(kKeys, kHeadDimQk, kHeadDimV, kQuantized, kTokenScales);
  static constexpr int kBlocksQk = (kHeadDimQk + 15) / 16, kBlocksV = (kHeadDimV + 15) / 16;  // blocks of 16 channels
  using LayoutK = common::RowLayout<kernels::mma_chunks(kHeadDimQk)>;                         // for Q too
  using LayoutV = common::RowLayout<kernels::mma_chunks(kHeadDimV)>;
  using LayoutVt = common::RowLayout<kernels::mma_chunks(kKeys)>;  // a row is a channel
  // Q stays in registers if its shared memory is needed for codes.
  static constexpr bool kQInRegisters = kQuantized && kernels::mma_q_in_registers(kRowTiles, kHeadDimQk, kHeadDimV);
  // fp32 numbers are three bf16 numbers; two of Q's stay in registers if there are enough (prefill_fp32_mma.cu).
  static constexpr bool kFp32 = kType == common::kFloat32,
                        kQPartsInRegisters = kFp32 && kernels::mma_fp32_q_in_registers(kHeadDimQk, kHeadDimV);
  // P may exceed 1 by this power of two before O is rescaled.
  static constexpr float kRescaleThreshold = 8;
  // P carries a factor of 2^kMaxOffset until the epilogue: fp16 drops numbers below 2^-25, so P starts as high as its
  // range allows.
  static constexpr int kMaxOffset = kType == common::kFloat16 ? 7 : 0;

  static_assert(!kQuantized || common::element_size(kCacheType) == 1, "a cache has q's type, or 8 bits");
  static_assert(!kQuantized || (kHeadDimQk % 16 == 0 && kHeadDimV % 16 == 0), "rows of codes are whole chunks");
  static_assert(!kXpacked || (kKeys == 64 && kHeadDimV % 16 == 0 && kType != common::kFloat32),
                "tiles of V by channels have 64 keys and whole blocks of channels");
  static_assert(kKeys == 16 || kKeys == 32 || kKeys == 64, "the key bits fit two words");
  static_assert(LayoutK::kPitch == kernels::mma_pitch(kHeadDimQk), "host and device agree on a row");
};

}  // namespace attune::prefill_mma
