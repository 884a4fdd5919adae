// SPDX-License-Identifier: Apache-2.0
// A specialisation of prefill_mma.cu, from the macros that the host compiles it with, and its shared memory.
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
#ifndef ATTUNE_KEYS
#define ATTUNE_KEYS 64
#endif

namespace attune::prefill_mma {

using kernels::WorkTile;
using kernels::WorkTileParams;

struct Config {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kType = ATTUNE_TYPE, kCacheType = ATTUNE_CACHE_TYPE, kOutType = ATTUNE_OUT_TYPE;  // attune_dtype
  static constexpr unsigned kScore = ATTUNE_SCORE, kMask = ATTUNE_MASK;
  static constexpr bool kCached = ATTUNE_CACHED != 0, kDense = ATTUNE_DENSE != 0;
  // The cache has 8 bits: its codes become numbers of 16 bits, exactly, and the scales go to scores, P and O
  // (codes.cuh). A scale of all keys multiplies products and O; scales of tokens the columns of S and P.
  static constexpr bool kQuantized = kCached && kCacheType != kType,
                        kTokenScales = kQuantized && ATTUNE_TOKEN_SCALES != 0;
  // fp16 has not the range of P times a scale: such a P is the sum of two bf16 numbers, and its V bf16.
  static constexpr int kPParts = kTokenScales && kType == common::kFloat16 ? 2 : 1;
  static constexpr int kCodeTypeV = kPParts == 2 ? common::kBFloat16 : kType;
  static constexpr int kRowTiles = ATTUNE_ROW_TILES;  // of 16 rows, of a warp
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kRowTiles * kWarps, kKeys = ATTUNE_KEYS;
  static constexpr int kHalves = kKeys / 32;  // of a tile, a bit for each key in a word
  // Of a tile's page ids, one for as many rows.
  static constexpr int kRowsOfId =
      kKeys / kernels::mma_page_ids(kKeys, kHeadDimQk, kHeadDimV, kQuantized, kTokenScales);
  static constexpr int kBlocksQk = (kHeadDimQk + 15) / 16, kBlocksV = (kHeadDimV + 15) / 16;  // of 16 channels
  using LayoutK = common::RowLayout<kernels::mma_chunks(kHeadDimQk)>;                         // of Q too
  using LayoutV = common::RowLayout<kernels::mma_chunks(kHeadDimV)>;
  // Q stays in registers, where its place in shared memory is needed for codes.
  static constexpr bool kHoldsQ = kQuantized && kernels::mma_holds_queries(kRowTiles, kHeadDimQk, kHeadDimV);
  // P may exceed 1 by this power of two before O is rescaled.
  static constexpr float kRescaleThreshold = 8;
  // P carries a factor of 2^kMaxOffset until the epilogue: fp16 drops numbers below 2^-25, so they start as high as its
  // range allows.
  static constexpr int kMaxOffset = kType == common::kFloat16 ? 7 : 0;

  static_assert(kType == common::kFloat16 || kType == common::kBFloat16, "16-bit rows");
  static_assert(!kQuantized || common::element_size(kCacheType) == 1, "a cache has q's type, or 8 bits");
  static_assert(!kQuantized || (kHeadDimQk % 16 == 0 && kHeadDimV % 16 == 0), "rows of codes are whole pieces");
  static_assert(kKeys == 32 || kKeys == 64, "a bit for each key in a word or two");
  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "rows are whole chunks");
  static_assert(LayoutK::kPitch == kernels::mma_pitch(kHeadDimQk), "host and device agree on a row");
};

template <bool kThere>
struct QueryRows {};
template <>
struct QueryRows<true> {
  alignas(128) unsigned char q[Config::kRows * Config::LayoutK::kPitch];
};
template <bool kThere>
struct Codes {};
template <>
struct Codes<true> {
  // 16 bytes of a row in the place of the thread that copies and converts them (codes.cuh).
  alignas(128) unsigned char codes_k[Config::kKeys * Config::kBlocksQk * 16];
  unsigned char codes_v[Config::kKeys * Config::kBlocksV * 16];
};
template <bool kThere>
struct TokenScales {};
template <>
struct TokenScales<true> {
  // Of a tile; of V of two, as the next tile's come while this one's are used.
  alignas(128) float k_scales[Config::kKeys];
  float v_scales[2][Config::kKeys];
};

// What a specialisation lacks is an empty base.
struct SharedStorage : QueryRows<!Config::kHoldsQ>, Codes<Config::kQuantized>, TokenScales<Config::kTokenScales> {
  alignas(128) unsigned char k[Config::kKeys * Config::LayoutK::kPitch];
  alignas(128) unsigned char v[Config::kKeys * Config::LayoutV::kPitch];
  WorkTile work;  // in registers these would push others out
  int head, kv_head;
  // A bit for each key of the tile: whether its pages exist, and whether a part of its value has a NaN or infinity.
  unsigned found[Config::kHalves], special[Config::kThreads / Config::kKeys][Config::kHalves];
  float threshold;         // of softmax(), where it would be held in a register
  float k_scale, v_scale;  // of an 8-bit cache: those of all keys of the head
  bool v_is_odd;           // not finite; v_scale is 1 then
  int pages[Config::kCached ? Config::kKeys / Config::kRowsOfId : 1];  // of the next tile (cached_rows.cuh)
};
static_assert(sizeof(SharedStorage) <= kernels::mma_shared_bytes(Config::kRows, Config::kKeys, Config::kHeadDimQk,
                                                                 Config::kHeadDimV, Config::kQuantized,
                                                                 Config::kTokenScales),
              "the host asks for less shared memory than this");

}  // namespace attune::prefill_mma
