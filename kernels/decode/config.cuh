// SPDX-License-Identifier: Apache-2.0
// The configuration of the decode kernels, from the macros that the host compiles them with.
#pragma once

#include "common/attention_params.h"
#include "common/kinds.h"
#include "common/operand.cuh"
#include "decode/shared_bytes.h"

namespace attune::decode {

using kernels::AttentionParams;

// ATTUNE_LOAD: how rows of the cache are addressed.
constexpr int kLoadTiles = 0;     // 16 keys from a multiple of 16 on share a page
constexpr int kLoadRows = 1;      // each row has its own address: small pages, rings, beams
constexpr int kLoadElements = 2;  // each element has its own address: x-packed layouts, rows not aligned to 4 bytes

// decode_cluster.cu: a block has one split, and all sequences have the same number of queries.
#ifndef ATTUNE_CLUSTER
#define ATTUNE_CLUSTER 0
#endif

using common::kLog2e;

struct Config {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kQType = ATTUNE_Q_TYPE, kKvType = ATTUNE_KV_TYPE, kOutType = ATTUNE_OUT_TYPE;  // attune_dtype
  static constexpr int kRowTiles = ATTUNE_ROW_TILES;  // tiles of eight packed rows
  static constexpr int kParts = ATTUNE_PARTS;         // a query, and P, is a sum of this many 16-bit numbers
  static constexpr int kWarps = ATTUNE_WARPS, kStages = ATTUNE_STAGES, kBlocksPerSm = ATTUNE_BLOCKS_PER_SM;
  static constexpr int kLoad = ATTUNE_LOAD;
  static constexpr int kCopyBytes = ATTUNE_COPY_BYTES;  // bytes of one cp.async
  // A stage holds this many token scales of a key, and of its value. kKeyFactors: it is one, which multiplies S, or P.
  static constexpr int kTokenScales = ATTUNE_TOKEN_SCALES;
  static constexpr bool kKeyFactors = kTokenScales == 1;
  static constexpr int kScalesOfKey = scales_of_key(kTokenScales, kHeadDimQk, kHeadDimV);
  static constexpr unsigned kScore = ATTUNE_SCORE, kMask = ATTUNE_MASK;
  static constexpr bool kNewTokens = ATTUNE_NEW_TOKENS != 0;
  static constexpr bool kPrologue = ATTUNE_PROLOGUE != 0;  // there is more than append
  // Rows of q, k, v and of the prologue's tables are contiguous and aligned to the vectors of prologue.cuh.
  static constexpr bool kVectors = ATTUNE_VECTORS != 0;

  static constexpr bool kCluster = ATTUNE_CLUSTER != 0;

  static constexpr int kThreads = 32 * kWarps, kRows = 8 * kRowTiles;
  static constexpr int kTileKeys = kWarps * kernels::kKeysOfWarp;
  static constexpr int kElement = common::element_size(kKvType);
  static constexpr bool kBf16x3 = kElement == 4;  // fp32 caches: sums of common::kSplitParts bf16 numbers
  static constexpr int kComputeType = common::compute_type(kQType, kKvType);
  static constexpr int kBlocksQk = (kHeadDimQk + 15) / 16, kBlocksV = (kHeadDimV + 15) / 16;  // of 16 channels
  static constexpr int kChunksK = kernels::row_chunks(kElement, kHeadDimQk),
                       kChunksV = kernels::row_chunks(kElement, kHeadDimV);
  static constexpr int kChunksQ = kernels::row_chunks(2, kHeadDimQk);
  using LayoutK = common::RowLayout<kChunksK>;
  using LayoutV = common::RowLayout<kChunksV>;
  using LayoutQ = common::RowLayout<kChunksQ>;
  static constexpr int kBytesK = kernels::kKeysOfWarp * LayoutK::kPitch,
                       kBytesV = kernels::kKeysOfWarp * LayoutV::kPitch;
  static constexpr int kStageBytes = kBytesK + kBytesV + 2 * 4 * kernels::kKeysOfWarp * kScalesOfKey;
  // channels that the epilogue exchanges at a time
  static constexpr int kMergeChannels = kernels::kMergeFloats / kRows;
  static constexpr int kMergePitch = kMergeChannels + 4;
  static constexpr int kScratchFloats = kMergePitch * kRows;  // of a warp, in the exchange
  // Rows end within a block of 16 channels: the bytes after them, which no copy writes, must be zero.
  static constexpr bool kPadded = kHeadDimQk % 16 != 0 || kHeadDimV % 16 != 0;
  static constexpr bool kQueriesInRegisters = kBlocksQk * 2 * kRowTiles * kParts <= 32;

  static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0, "head dims go in steps of 8");
  static_assert(kRowTiles == 1 || kRowTiles == 2 || kRowTiles == 4, "8, 16 or 32 packed rows a block");
  static_assert(kWarps <= kRows, "every warp has a query row to store");
  static_assert(kMergeChannels % 16 == 0, "the exchange moves whole blocks of channels");
  static_assert(16 * (kBlocksQk + kBlocksV) <= kScratchFloats, "a new token's key and value fit a warp's scratch");
  static_assert(kStages >= 2, "one stage loads while another is read");
  static_assert(kStageBytes == kernels::stage_bytes(kElement, kHeadDimQk, kHeadDimV, kTokenScales),
                "the host computes another size");
  static_assert(LayoutK::kPitch == kernels::row_pitch(kChunksK), "host and device agree on a row");
};

}  // namespace attune::decode
