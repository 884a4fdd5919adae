// SPDX-License-Identifier: Apache-2.0
// What a prefill kernel is compiled for.
#pragma once

#include "prefill/tiles.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/pipeline_state.cuh"
#include "tile/score_terms.cuh"

namespace attune::prefill {

using kernels::PrefillParams;
using kernels::WorkTile;
using tile::PipelineState;

using tile::kAlibi, tile::kAlibiSqrt, tile::kBias, tile::kMaskBits, tile::kMaskRanges, tile::kSoftcap, tile::kT5;
#ifndef ATTUNE_XPACKED
#define ATTUNE_XPACKED 0
#endif
#ifndef ATTUNE_GATHER
#define ATTUNE_GATHER 0
#endif
#ifndef ATTUNE_LOW_CAP
#define ATTUNE_LOW_CAP 0
#endif
#ifndef ATTUNE_QUERY_STAGES
#define ATTUNE_QUERY_STAGES 1
#endif

constexpr int kScaleFirst = 32;  // of ATTUNE_SCORE too: the scale is not positive

struct Config {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kType = ATTUNE_TYPE, kCacheType = ATTUNE_CACHE_TYPE, kOutType = ATTUNE_OUT_TYPE;
  static constexpr int kScore = ATTUNE_SCORE, kMask = ATTUNE_MASK;
  static constexpr bool kCached = ATTUNE_CACHED != 0, kDense = ATTUNE_DENSE != 0;
  // An x-packed cache enters the products as it lies; new tokens beside it as rows. Of one of codes K becomes rows, V
  // what it is in one of 16 bits (dequant_xpacked.cuh).
  static constexpr bool kXpacked = ATTUNE_XPACKED != 0;
  // q, k and v are codes of 8 bits that enter the products as they are (prefill_fp8.cu). Two warps beside the producer
  // transpose V, which comes to the ring of codes.
  static constexpr int kElementSize = tile::element_size(kType);
  static constexpr bool kFp8 = kElementSize == 1;
  static constexpr int kTransposeWarps = kFp8 ? 2 : 0;
  // q is fp32, and so are dense k and v (prefill_fp32.cu): four warps load all rows and make each number three of bf16.
  static constexpr bool kFp32 = kElementSize == 4;
  static constexpr int kBf16Parts = kFp32 ? 3 : 1, kBf16x3Warps = kFp32 ? 4 : 0;
  static constexpr int kRows = kernels::prefill_rows(kHeadDimQk, kHeadDimV, kElementSize);
  static constexpr int kMathGroups = kRows / 64, kMathWarps = 4 * kMathGroups, kMathThreads = 128 * kMathGroups;
  static constexpr int kThreads = 128 + kMathThreads;
  // Elements of the cache are not of q's type, and may have scales.
  static constexpr bool kCacheTypeDiffers = kCached && kCacheType != kType;
  // The cache has 8 bits: three warps beside the producer make them elements of kType.
  static constexpr bool kQuantized = kCacheTypeDiffers && !kFp32;
  // The TMA does not take the cache's rows: four warps copy them, so many bytes at a time.
  static constexpr int kGather = ATTUNE_GATHER;
  static constexpr bool kGathers = kGather > 0;
  static constexpr bool kXpackedK = kXpacked && !kQuantized && !kGathers;  // K enters the products in pieces
  // Codes are exact in fp16, which takes one instruction for two of them, so bf16 queries become fp16 before they meet
  // those (fp16_queries.cuh). Scales never touch codes, which would round. One scale for all keys of a head is part of
  // what scores are multiplied with, that of V multiplies O, and weights are fp16. Scales of tokens multiply scores and
  // weights. Weights with scales would leave fp16's range, so they are bf16, as V is; where q is fp16 each is the sum
  // of two of bf16, because one has fewer bits than fp16 outputs show.
  static constexpr bool kTokenScales = kQuantized && ATTUNE_TOKEN_SCALES != 0;
  static constexpr bool kFp16P = kQuantized && !kTokenScales;
  static constexpr int kPParts = kTokenScales && kType == tile::kFloat16 ? 2 : 1;
  // K and V come by warps of their own, where their registers and those of the math leave room.
  static constexpr bool kTwoProducerWarps =
      !kQuantized && !kGathers && !kFp32 && kHeadDimV <= 128 && !(kCached && kScore != 0);
  static constexpr int kDequantWarps = kQuantized ? 3 : 0, kGatherWarps = kGathers ? 4 : 0,
                       kRawStages = ATTUNE_RAW_STAGES;
  static constexpr int kWorkReaders =  // warps
      kMathWarps + kDequantWarps + kGatherWarps + kTransposeWarps + kBf16x3Warps + (kTwoProducerWarps ? 1 : 0);
  // Where math groups have registers for what is found out ahead of its use.
  static constexpr bool kPrecomputeMask =
      !kCached && kHeadDimV <= 128 && (kScore == 0 || (kScore == kAlibi && kElementSize == 2)) && kMask == 0;
  // The warps beside the producer leave the math groups few.
  static constexpr bool kLowRegisters = kQuantized || (kGathers && kScore != 0);
  // Exponentials wait for no maximum but the first of a row.
  static constexpr bool kMayDeferMax =
      kElementSize == 2 && kHeadDimV <= 128 && kMask == 0 && !kLowRegisters && !kXpacked;
  static constexpr bool kDeferredMax = kMayDeferMax && (kScore == 0 || kScore == kAlibi);
  // The same while scores are small beside a softcap, unless it is so low that they hardly ever are.
  static constexpr bool kDeferredMaxSoftcap = kMayDeferMax && kScore == kSoftcap && ATTUNE_LOW_CAP == 0;
  static constexpr int kProducerRegisters = kFp32                        ? 104
                                            : kQuantized || kGathers     ? 72
                                            : kFp8 || !kTwoProducerWarps ? 40
                                            : kCached                    ? 72
                                                                         : 56;
  static constexpr int kMathRegisters = (504 - kProducerRegisters) / 2;
  static constexpr int kKeys = ATTUNE_KEYS, kStages = ATTUNE_STAGES;
  static constexpr int kPRegs = kPParts * kKeys / 4;  // registers
  // Two of q: that of the next work tile is there while one runs, and its first product begins beside the last one. V,
  // which is needed a tile after K, has a stage less.
  static constexpr int kQueryStages = ATTUNE_QUERY_STAGES, kValueStages = kStages - (kQueryStages - 1);
  static constexpr bool kOverlapNextQK = kQueryStages > 1;

  // A product takes 32 bytes along its sum, a line of shared memory has 128.
  static constexpr int kMmaBytes = kFp32 ? 2 : kElementSize;
  static constexpr int kChannelsPerMma = 32 / kMmaBytes, kChannelsPerLine = 128 / kMmaBytes;
  static constexpr int kQkSteps = (kHeadDimQk + kChannelsPerMma - 1) / kChannelsPerMma,
                       kPvSteps = kKeys / kChannelsPerMma;
  static constexpr int kBlocksQk = (kHeadDimQk + kChannelsPerLine - 1) / kChannelsPerLine,
                       // of a line's channels
      kBlocksV = (kHeadDimV + kChannelsPerLine - 1) / kChannelsPerLine;
  static constexpr int kChannels = (kHeadDimV + 31) / 32 * 32;  // of the accumulators
  static constexpr int kBytesQ = kBf16Parts * kBlocksQk * kRows * 128, kBytesK = kBf16Parts * kBlocksQk * kKeys * 128,
                       kBytesV =
                           kFp8 ? kChannels * 128 : kBf16Parts * kBlocksV * kKeys * 128,  // codes: a line a channel
      kBytesRaw = kernels::raw_bytes(kKeys, kFp8 ? kHeadDimV : kHeadDimQk, kHeadDimV);
  static constexpr int kXpackedKBytes = 32 * kQkSteps, kXpackedVBytes = 2 * kChannels;  // of a key
  // kQuantizedTile: of tiles that were codes.
  template <bool kQuantizedTile>
  static constexpr ptx::Type kQkMmaType =
      kType == tile::kBFloat16 && !(kQuantized && kQuantizedTile) ? ptx::Type::kBf16 : ptx::Type::kF16;
  template <bool kQuantizedTile>
  static constexpr ptx::Type kPvMmaType = (kQuantized && kQuantizedTile ? kTokenScales : kType == tile::kBFloat16)
                                              ? ptx::Type::kBf16
                                              : ptx::Type::kF16;
  // Rows of outputs pass through those of q, which is needed no more, to be stored by pieces of 16 bytes.
  static constexpr bool kStoreOutThroughQ =
      kOverlapNextQK && kBlocksV <= kBlocksQk && (kOutType == tile::kBFloat16 || kOutType == tile::kFloat16);

  static_assert(kType == tile::kBFloat16 || kType == tile::kFloat16 || kType == tile::kE4m3 || kType == tile::kFloat32,
                "what wgmma takes, and fp32");
  static_assert(!kXpacked || (kCached && !kFp8 && !kFp32), "x-packed caches are of q's 16 bits, or of codes");
  static_assert(!kGathers || (kCached && !kCacheTypeDiffers && !kFp8 && !kFp32), "of caches of q's 16 bits");
  static_assert((kQuantized || kFp8) == (kRawStages > 0), "a ring of codes where there are codes, and nowhere else");
  static_assert(!kFp8 || (kKeys <= 128 && kHeadDimV <= 128 && kDense && !kCached && kScore == 0 && kMask == 0),
                "what codes are not made for");
  static_assert(!(kQuantized || kFp8) || (kHeadDimQk % 16 == 0 && kHeadDimV % 16 == 0),
                "TMA copies multiples of 16 bytes");
  static_assert(!kXpacked || kHeadDimQk % 8 == 0, "x-packed keys come in pieces of 16 bytes");
  static_assert(kHeadDimQk <= 256 && kHeadDimV <= 256, "the accumulators would not fit the registers");
  static_assert(kKeys % 32 == 0 && kKeys <= 256, "wgmma's columns, as ptx/wgmma.cuh has them");
  static_assert(kKeys <= 128 || kMask == 0, "masks have a bit for each of a thread's keys in one word");
  static_assert(!kOverlapNextQK || kPrecomputeMask, "S of the next work takes registers while a work is stored");
  static_assert(kQueryStages <= 2 && kValueStages > 0, "two of q at most, which take a stage of V");
};

using Tiles = KeyTiles<Config::kKeys, Config::kCached>;

// Of the math threads, from 0.
__device__ __forceinline__ int math_thread() { return static_cast<int>(threadIdx.x) - 128; }
// The first of this thread's two packed rows of the block; the other is 8 further.
__device__ __forceinline__ int row_of_thread() {
  return math_thread() / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Numbered barriers.
constexpr int kWarpSchedulerBarrier = 1;  // and 2
constexpr int kMathBarrier = 3, kLoadBarrier = 4;
constexpr int kGroupBarrier = 5;  // and 6

}  // namespace attune::prefill
