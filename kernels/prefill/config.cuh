// SPDX-License-Identifier: Apache-2.0
// The compile-time configuration of a prefill kernel.
#pragma once

#include "common/cached_slot.cuh"
#include "common/element.cuh"
#include "common/kinds.h"
#include "common/lanes.cuh"
#include "common/pipeline_state.cuh"
#include "prefill/prefill_params.h"
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill {

using common::find_slot, common::has_value, common::int_at, common::page_exists, common::scale_of, common::slot_in_page;
using common::quad_max, common::quad_sum;
using common::kLog2e;
using common::PipelineState, common::Slot;
using kernels::WorkTile, kernels::WorkTileParams;
using scheduler::end_visible, scheduler::first_visible, scheduler::kNoMoreWork, scheduler::tile_at;
using scheduler::KeyTiles, scheduler::Tile, scheduler::TileScheduler, scheduler::TileSpan;

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
#ifndef ATTUNE_ROW_PAIRS
#define ATTUNE_ROW_PAIRS 0
#endif
#ifndef ATTUNE_CLUSTER
#define ATTUNE_CLUSTER 1
#endif

struct Config {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = ATTUNE_HEAD_DIM_V;
  static constexpr int kType = ATTUNE_TYPE, kCacheType = ATTUNE_CACHE_TYPE, kOutType = ATTUNE_OUT_TYPE;
  static constexpr unsigned kScore = ATTUNE_SCORE, kMask = ATTUNE_MASK;
  static constexpr bool kCached = ATTUNE_CACHED != 0, kDense = ATTUNE_DENSE != 0;
  // Tiles of an x-packed 16-bit cache are wgmma operands in the layout they have in memory; dense tiles of new tokens
  // are swizzled rows. From an x-packed 8-bit cache K is dequantized to rows, and V to the x-packed layout of 16 bits
  // (dequant_xpacked.cuh).
  static constexpr bool kXpacked = ATTUNE_XPACKED != 0;
  // q, k and v are e4m3 and enter the tensor cores unchanged (prefill_fp8.cu). Two warps beside the producer transpose
  // V, which arrives in the ring of raw stages.
  static constexpr int kElementSize = common::element_size(kType);
  static constexpr bool kFp8 = kElementSize == 1;
  static constexpr int kTransposeWarps = kFp8 ? 2 : 0;
  // q and dense k and v are fp32 (prefill_fp32.cu): four warps load all rows and split each number into three bf16.
  static constexpr bool kFp32 = kElementSize == 4;
  static constexpr int kBf16Parts = kFp32 ? 3 : 1, kBf16x3Warps = kFp32 ? 4 : 0;
  // Packed rows of a block, 64 for each consumer warpgroup.
  static constexpr int kRows = ATTUNE_ROWS, kConsumerGroups = kRows / 64, kConsumerWarps = 4 * kConsumerGroups;
  static constexpr int kConsumerThreads = 128 * kConsumerGroups, kThreads = 128 + kConsumerThreads;
  // The cache's element type differs from q's. The cache may have scales.
  static constexpr bool kCacheTypeDiffers = kCached && kCacheType != kType;
  // The cache has 8 bits: three dequant warps convert it to kType or fp16.
  static constexpr bool kQuantized = kCacheTypeDiffers && !kFp32;
  // Bytes of a cp.async if the TMA cannot copy the cache's rows and four warps gather them; otherwise 0.
  static constexpr int kGather = ATTUNE_GATHER;
  static constexpr bool kGathers = kGather > 0;
  static constexpr bool kXpackedK = kXpacked && !kQuantized && !kGathers;  // wgmma reads K without swizzle
  // Two blocks form a cluster. They have the same tokens and different halves of the query heads of one KV head, or
  // with kRowPairs the same heads and neighbouring tokens. So they need the same tiles of keys: each block copies half
  // of the lines of a tile, by multicast to both.
  static constexpr int kCluster = ATTUNE_CLUSTER;
  static constexpr bool kRowPairs = ATTUNE_ROW_PAIRS != 0;
  // 8-bit values are exact in fp16, and two convert in one instruction; bf16 queries become fp16 to match
  // (fp16_queries.cuh). K and V themselves are never scaled, because that would round them. A scale per tensor or head
  // multiplies the scores (K) and O (V), and P is fp16. Scales per token multiply scores and P. Such a P would overflow
  // fp16, so P and V are bf16. With fp16 queries each such P is the sum of two bf16 numbers, because fp16 outputs show
  // more bits than one bf16 has.
  static constexpr int kTokenScales = kQuantized ? ATTUNE_TOKEN_SCALES : 0;
  static constexpr bool kKeyFactors = kTokenScales == 1;  // a key has one scale, which multiplies S, or P
  static constexpr bool kFp16P = kQuantized && kTokenScales == 0;
  static constexpr int kPParts = kTokenScales != 0 && kType == common::kFloat16 ? 2 : 1;
  // K and V have one producer warp each if the register budget allows.
  static constexpr bool kTwoProducerWarps =
      !kQuantized && !kGathers && !kFp32 && kHeadDimV <= 128 && !(kCached && kScore != 0);
  static constexpr int kDequantWarps = kQuantized ? 3 : 0, kGatherWarps = kGathers ? 4 : 0,
                       kRawStages = ATTUNE_RAW_STAGES;
  static constexpr int kWorkReaders =  // warps
      kConsumerWarps + kDequantWarps + kGatherWarps + kTransposeWarps + kBf16x3Warps + (kTwoProducerWarps ? 1 : 0);
  // The mask of the first tile is computed before its scores arrive if registers allow.
  static constexpr bool kPrecomputeMask =
      !kCached && kHeadDimV <= 128 && (kScore == 0 || (kScore == use::kAlibi && kElementSize == 2)) && kMask == 0;
  // The warps beside the producer leave the consumer warps few registers.
  static constexpr bool kLowRegisters = kQuantized || (kGathers && kScore != 0);
  // Deferred max: exponentials use a max of earlier tiles; only the first visible tile of a row waits for its max.
  static constexpr bool kMayDeferMax =
      kElementSize == 2 && kHeadDimV <= 128 && kMask == 0 && !kLowRegisters && !kXpacked;
  static constexpr bool kDeferredMax = kMayDeferMax && (kScore == 0 || kScore == use::kAlibi);
  // The same with softcap, while scores are small compared to the cap. Not for low caps, where they rarely are.
  static constexpr bool kDeferredMaxSoftcap = kMayDeferMax && kScore == use::kSoftcap && ATTUNE_LOW_CAP == 0;
  static constexpr int kProducerRegisters = kConsumerGroups == 3 && !kCached ? 32
                                            : kConsumerGroups == 3       ? 56
                                            : kFp32                      ? 104
                                            : kQuantized || kGathers     ? 72
                                            : kFp8 || !kTwoProducerWarps ? 40
                                            : kCached                    ? 72
                                                                         : 56;
  static constexpr int kConsumerRegisters =
      kConsumerGroups == 3 ? (512 - kProducerRegisters) / 3 : (504 - kProducerRegisters) / 2;
  static constexpr int kKeys = ATTUNE_KEYS, kStages = ATTUNE_STAGES;
  static constexpr int kPRegs = kPParts * kKeys / 4;  // registers of P in a thread
  // With two stages of q the next work tile's q arrives early, and its first QK GEMM overlaps the last PV GEMM. V is
  // needed one tile after K, so V has one stage less then.
  static constexpr int kQueryStages = ATTUNE_QUERY_STAGES, kValueStages = kStages - (kQueryStages - 1);
  static constexpr bool kOverlapNextQK = kQueryStages > 1;

  // One wgmma takes 32 bytes along K. A swizzled line of shared memory has 128.
  static constexpr int kMmaBytes = kFp32 ? 2 : kElementSize;
  static constexpr int kChannelsPerMma = 32 / kMmaBytes, kChannelsPerLine = 128 / kMmaBytes;
  static constexpr int kQkSteps = (kHeadDimQk + kChannelsPerMma - 1) / kChannelsPerMma,
                       kPvSteps = kKeys / kChannelsPerMma;
  static constexpr int kBlocksQk = (kHeadDimQk + kChannelsPerLine - 1) / kChannelsPerLine;  // lines of a row
  static constexpr int kBlocksV = (kHeadDimV + kChannelsPerLine - 1) / kChannelsPerLine;
  static constexpr int kChannels = (kHeadDimV + 31) / 32 * 32;  // of the accumulators
  static constexpr int kBytesQ = kBf16Parts * kBlocksQk * kRows * 128, kBytesK = kBf16Parts * kBlocksQk * kKeys * 128;
  // fp8: V is transposed, one line a channel.
  static constexpr int kBytesV = kFp8 ? kChannels * 128 : kBf16Parts * kBlocksV * kKeys * 128;
  static constexpr int kBytesRaw = kernels::raw_bytes(kKeys, kFp8 ? kHeadDimV : kHeadDimQk, kHeadDimV);
  static constexpr int kXpackedKBytes = 32 * kQkSteps, kXpackedVBytes = 2 * kChannels;  // of a key
  // kQuantizedTile: the tile was dequantized.
  template <bool kQuantizedTile>
  static constexpr ptx::Type kQkMmaType =
      kType == common::kBFloat16 && !(kQuantized && kQuantizedTile) ? ptx::Type::kBf16 : ptx::Type::kF16;
  template <bool kQuantizedTile>
  static constexpr ptx::Type kPvMmaType =
      (kQuantized && kQuantizedTile ? kTokenScales != 0 : kType == common::kBFloat16) ? ptx::Type::kBf16
                                                                                      : ptx::Type::kF16;
  // Output rows are staged in the shared memory of q, which is no longer needed, so that stores have 16 bytes.
  static constexpr bool kStoreOutThroughQ =
      kOverlapNextQK && kBlocksV <= kBlocksQk && (kOutType == common::kBFloat16 || kOutType == common::kFloat16);

  static_assert(kType == common::kBFloat16 || kType == common::kFloat16 || kType == common::kE4m3 ||
                kType == common::kFloat32,
                "what wgmma takes, and fp32");
  static_assert(!kXpacked || (kCached && !kFp8 && !kFp32), "x-packed caches have q's 16 bits, or 8 bits");
  static_assert(!kGathers || (kCached && !kCacheTypeDiffers && !kFp8 && !kFp32), "gathered caches have q's 16 bits");
  static_assert((kQuantized || kFp8) == (kRawStages > 0), "raw stages where there are 8-bit tiles, and nowhere else");
  static_assert(!kFp8 || (kKeys <= 128 && kHeadDimV <= 128 && kDense && !kCached && kScore == 0 && kMask == 0),
                "not supported with fp8");
  static_assert(!(kQuantized || kFp8) || (kHeadDimQk % 16 == 0 && kHeadDimV % 16 == 0),
                "TMA copies multiples of 16 bytes");
  static_assert(!kXpacked || kHeadDimQk % 8 == 0, "x-packed K is copied in pieces of 16 bytes");
  static_assert(kHeadDimQk <= 256 && kHeadDimV <= 256, "the accumulators would not fit the registers");
  static_assert(kKeys % 32 == 0 && kKeys <= 256, "wgmma's columns, as ptx/wgmma.cuh has them");
  static_assert(kKeys <= 128 || kMask == 0, "masks have a bit for each of a thread's keys in one word");
  static_assert(!kOverlapNextQK || kPrecomputeMask, "S of the next work tile needs registers during the epilogue");
  static_assert(kQueryStages <= 2 && kValueStages > 0, "at most two stages of q; the second takes one of V");
  static_assert(kConsumerGroups <= 2 || (kElementSize == 2 && !kQuantized && !kGathers && !kXpacked && kScore == 0),
                "three consumer groups have few registers each");
  static_assert(kCluster == 1 || (kCluster == 2 && kElementSize == 2 && !kQuantized && !kGathers && !kXpacked),
                "pairs share the lines of 16-bit rows that the TMA copies");
};

using Tiles = KeyTiles<Config::kKeys, Config::kCached>;

// This thread's number among the consumer threads.
__device__ __forceinline__ int consumer_thread() { return static_cast<int>(threadIdx.x) - 128; }
// The first of this thread's two packed rows of the block; the other is 8 rows further.
__device__ __forceinline__ int row_of_thread() {
  return consumer_thread() / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}

// Named barriers. Names in plural stand for three, one for each consumer warpgroup.
constexpr int kWarpSchedulerBarriers = 1, kConsumerBarrier = 4, kLoadBarrier = 5, kGroupBarriers = 6;

// Consumer warpgroups issue their GEMMs in turn (FA3's ping-pong): each arrives at the next one's barrier.
constexpr int kWarpSchedulerThreads = 256;  // of a warpgroup, and of the one before it
__device__ __forceinline__ void warp_scheduler_sync(int group) {
  ptx::named_barrier_sync(kWarpSchedulerBarriers + group, kWarpSchedulerThreads);
}
__device__ __forceinline__ void warp_scheduler_arrive(int group) {
  const int next = Config::kConsumerGroups == 2 ? 1 - group : (group + 1) % Config::kConsumerGroups;
  ptx::named_barrier_arrive(kWarpSchedulerBarriers + next, kWarpSchedulerThreads);
}
// Arrives at the first warpgroup's barrier. Called by all consumer threads. The barrier's number is a constant, because
// computing it causes spills.
__device__ __forceinline__ void open_warp_scheduler(int group) {
  if (group == Config::kConsumerGroups - 1)
    ptx::named_barrier_arrive(kWarpSchedulerBarriers, kWarpSchedulerThreads);
}

}  // namespace attune::prefill
