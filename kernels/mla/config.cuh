// SPDX-License-Identifier: Apache-2.0
// What an MLA kernel is compiled for, and the addresses in its shared memory.
#pragma once

#include "mla/shared_storage.h"
#include "prefill/tile_scheduler.cuh"
#include "prefill/tiles.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "schedule/stamp.cuh"
#include "tile/element.cuh"
#include "tile/mla_codec.cuh"
#include "tile/pipeline_state.cuh"
#include "tile/shared_view.cuh"

namespace attune::mla {

using kernels::PrefillParams;
using kernels::WorkTile;
using prefill::Tile;
using prefill::tile_at;
using tile::PipelineState;

struct Config {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = kernels::kMlaHeadDimV;
  static constexpr int kType = ATTUNE_TYPE, kOutType = ATTUNE_OUT_TYPE;
  static constexpr int kProducer = ATTUNE_LOADER;
  static constexpr bool kSparse = ATTUNE_SPARSE != 0;
  static constexpr bool kDense = ATTUNE_DENSE != 0;  // there are rows that are not in a cache
  static constexpr bool kTma = kProducer == kernels::kMlaTma, kGather = kProducer == kernels::kMlaGather,
                        kDequant = kProducer >= kernels::kMlaDequant656;
  static constexpr int kBlockM = kernels::kMlaBlockM, kBlockN = kernels::kMlaBlockN, kStages = kernels::kMlaStages;
  static constexpr int kChunks = kHeadDimQk / 64, kChunksV = kHeadDimV / 64;  // of 64 channels
  static constexpr int kChunkBytes = kernels::kMlaChunkBytes, kTileBytes = kChunks * kChunkBytes;
  // Of the two math groups each has half of the channels of V.
  static constexpr int kMathWarps = 8, kChannels = kHeadDimV / 2;
  // Blocks that take neighbouring head tiles of a work tile side by side and share the keys that they have copied or
  // decode.
  static constexpr int kCluster = ATTUNE_CLUSTER;
  // What threads have stored must be made visible to products: by those who read it, unless the copy engine reads it
  // too, so that those who store it have done so.
  static constexpr bool kConsumerFence = !kTma && kCluster == 1;
  // Threads that bring keys; threads of a block.
  static constexpr int kThreads = kernels::mla_threads(kProducer, kCluster),
                       kProducerThreads = kThreads - 32 * kMathWarps;
  static constexpr int kWorkReaders = kThreads / 32 - 1;  // warps, without the one that writes
  // Packed rows in pairs of blocks: what is decoded of the next tile waits in registers
  // (mla/producers/dequant_registers.cuh).
  static constexpr bool kRegisterStaged = kDequant && kCluster > 1;
  // Lists of 16-bit rows, and boxes: group 1 has a product under way when it hands over its weights; lists: group 0 one
  // more (mla/m64/mainloop.cuh). That takes registers.
  static constexpr bool kOverlapNextQK = kGather && kSparse, kPublishPEarly = kOverlapNextQK || kTma;
  static constexpr int kProducerRegisters = kPublishPEarly ? 56 : !kDequant ? 72 : kProducerThreads == 128 ? 88 : 48;
  static constexpr int kMathRegisters = kDequant ? 208 : kPublishPEarly ? 224 : 216;
  static_assert(kProducerThreads / 128 * kProducerRegisters + 2 * kMathRegisters <=
                    kThreads / 128 * (65536 / kThreads / 8 * 8),
                "more registers than the block begins with");
  // Words that say which keys nobody sees: those that bring keys row by row have one for eight keys each.
  static constexpr int kMaskWords = kTma ? 2 : 8;
  static constexpr ptx::Type kProduct = kType == tile::kBFloat16 ? ptx::Type::kBf16 : ptx::Type::kF16;

  static_assert(kCluster == 1 || (kCluster == 2 && (kDequant || kTma)), "pairs of blocks share boxes or codes");
  static_assert(kType == tile::kBFloat16 || kType == tile::kFloat16, "wgmma takes 16-bit elements here");
  static_assert(kHeadDimQk == kHeadDimV || kHeadDimQk == kHeadDimV + 64, "channels beyond V's are one slice");
  static_assert(!kDequant || kType == tile::kBFloat16, "codes become bf16");
  static_assert(!(kSparse && kTma), "boxes hold neighbours");
};

// Of the packed format, where the cache has one.
using Packed = tile::MlaRow<Config::kProducer == kernels::kMlaDequant584 ? 584 : 656>;

// A tile's channels come, and are multiplied, in parts: first those that are in K only, then quarters of V.
struct Slice {
  int chunk, count;  // of 64 channels
};
constexpr int kSlices = kernels::kMlaSlices;
__device__ __forceinline__ constexpr Slice slice_at(int i) {
  return i == 0 ? Slice{Config::kChunksV, Config::kChunks - Config::kChunksV} : Slice{2 * i - 2, 2};
}
// Whether they are handed over by halves of V. Of a tile of math group 1 the half that it frees itself comes first
// then, as it is free before the other.
constexpr bool kSignalByHalf = Config::kGather || Config::kRegisterStaged;
// The order in which they come. second: in a tile of math group 1.
__device__ __forceinline__ constexpr int slice_in_order(int i, bool second) {
  if (Config::kDequant && !kSignalByHalf && i >= 2) return i == 4 ? 2 : i + 1;
  return kSignalByHalf && second && i > 0 ? (i + 1) % 4 + 1 : i;
}
// Halves have fewer barriers: what is in K only, and each half of V at the second of its parts.
__device__ __forceinline__ constexpr bool has_full_barrier(int slice) {
  return !kSignalByHalf || slice % 2 == 1 || slice == 0;
}
__device__ __forceinline__ constexpr int barrier_of(int slice) { return kSignalByHalf ? (slice + 1) / 2 * 2 : slice; }
// What lies beside a tile comes with this one.
constexpr int kMaskSlice = slice_at(0).count != 0 ? 0 : 2;
// Of a tile's buffer: what is in K only, and the halves of V. Part i is in buffer half_of(i).
constexpr int kKOnly = 0;
__device__ __forceinline__ constexpr int half_of(int slice) { return (slice + 1) / 2; }

// Stage and parity of a tile's buffer, by the tiles before it, of all work tiles.
static_assert(Config::kStages == 2, "stages and parities are bits of the count");
__device__ __forceinline__ PipelineState pipeline_state(unsigned tiles) {
  return {static_cast<int>(tiles % 2), tiles / 2 % 2};
}

__device__ __forceinline__ int slot_of_work(unsigned count) { return static_cast<int>(count % kernels::kWorkSlots); }

// What a math thread counts, in one register, as registers are scarce: work tiles, and modulo 4 the tiles of all work
// tiles.
class TileCounts {
 public:
  __device__ __forceinline__ unsigned work_tiles() const { return word_ >> 2; }
  __device__ __forceinline__ int slot() const { return slot_of_work(work_tiles()); }
  __device__ __forceinline__ void next_work() { word_ += 4; }
  // What has been derived from the count is derived anew, rather than kept in registers.
  __device__ __forceinline__ void refresh() { word_ = ptx::kept(word_); }
  __device__ __forceinline__ PipelineState pipe(unsigned ahead) const { return pipeline_state(word_ + ahead & 3); }
  __device__ __forceinline__ void advance(unsigned tiles) { word_ = (word_ & ~3u) | (word_ + tiles & 3); }

 private:
  unsigned word_ = 0;
};

// The page of a slot or a key of a pool.
__device__ __forceinline__ int page_of(const kernels::RowPool& pool, int x) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(x)) * pool.page_magic >>
                          pool.page_shift);
}

// Of a row of keys: where it begins, null where there is none; and MLA-584's scales, how far from there.
struct RowAddress {
  const char* row;
  int scales;
};

using SharedStorage = kernels::MlaStorage<Config::kHeadDimQk, Config::kMaskWords>;
static_assert(sizeof(SharedStorage) == kernels::mla_shared_bytes(Config::kProducer, Config::kHeadDimQk),
              "the host asks for another size");
static_assert(sizeof(SharedStorage) <= kernels::kMostSharedBytes, "more shared memory than a block can have");

// Addresses in shared memory.
struct Smem : tile::SharedView<SharedStorage> {
  using SharedView::SharedView;
  __device__ __forceinline__ kernels::ScheduleCheck& check() const { return ATTUNE_SHARED_FIELD(SharedStorage, check); }
  // With which sums begin (kernels::ScheduleCheck).
  __device__ __forceinline__ float first_sum() const {
    return ptx::load_shared(ATTUNE_SHARED_AT(SharedStorage, check.first_sum));
  }
  __device__ __forceinline__ unsigned q() const { return ATTUNE_SHARED_AT(SharedStorage, q); }
  __device__ __forceinline__ unsigned k(int stage) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, k, stage); }
  // Weights of a math thread, in four pieces of 16 bytes.
  __device__ __forceinline__ unsigned p(int thread, int vector) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, p, vector, thread);
  }
  __device__ __forceinline__ unsigned row_max_ref(int group, int row) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, row_max_refs, group, row);
  }
  __device__ __forceinline__ float2* stats(int group) const {
    // Two products: with one ptxas spills.
    return reinterpret_cast<float2*>(memory + ATTUNE_OFFSET_OF(SharedStorage, row_stats) +
                                     group * static_cast<int>(sizeof(SharedStorage::row_stats[0])) +
                                     threadIdx.x / 4 % 32 * sizeof(kernels::MlaRowStats));
  }
  // Keys [first, end) that a row may see.
  __device__ __forceinline__ int2* row_limits(int row) const {
    return &this->template value_at<int2>(ATTUNE_OFFSET_OF(SharedStorage, row_limits), row);
  }
  __device__ __forceinline__ unsigned unmasked_tiles() const { return ATTUNE_SHARED_AT(SharedStorage, unmasked_tiles); }
  // kernels::MlaTileNote; its words behind those of hidden keys are the tile's first key, and whether it is an edge.
  __device__ __forceinline__ unsigned mask(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, masks, stage);
  }
  __device__ __forceinline__ unsigned k_full(int stage, int slice) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, barriers.k_full, stage, slice);
  }
  __device__ __forceinline__ unsigned k_empty(int stage, int half) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, barriers.k_empty, stage, half);
  }
  __device__ __forceinline__ unsigned work_full(int slot) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.work_full, slot);
  }
  __device__ __forceinline__ unsigned work_empty(int slot) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.work_empty, slot);
  }
  __device__ __forceinline__ unsigned q_full() const { return ATTUNE_SHARED_AT(SharedStorage, barriers.q_full); }
  __device__ __forceinline__ unsigned q_empty() const { return ATTUNE_SHARED_AT(SharedStorage, barriers.q_empty); }
  __device__ __forceinline__ unsigned partial_full(int warp) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.partial_full, warp);
  }

  // In a cluster: what to add to a shared address for the same place in the other block.
  __device__ __forceinline__ unsigned to_other() const {
    return ptx::shared_in_block(base, 1 - ptx::cluster_rank()) - base;
  }
  // Item numbers from the cluster's first block to the other (prefill/tile_scheduler.cuh), the n-th in a ring. The
  // first block may tell one when the other has heard that of kMlaItems before: it takes a work tile while it loads the
  // one before that, and has loaded that of two before, so both have read the tiles of three before.
  __device__ __forceinline__ unsigned item(unsigned n) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, items, n % kernels::kMlaItems);
  }
  __device__ __forceinline__ unsigned item_full(unsigned n) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.item_full, n % kernels::kMlaItems);
  }
  __device__ __forceinline__ void tell_others(unsigned n, int x) const {
    const unsigned there = to_other();
    ptx::store_async(item(n) + there, static_cast<unsigned>(x), item_full(n) + there);
  }
  __device__ __forceinline__ int hear(unsigned n) const {
    if (threadIdx.x % 32 == 0) ptx::arrive_expecting(item_full(n), 4);
    __syncwarp();
    ptx::wait_phase(item_full(n), n / kernels::kMlaItems % 2);
    return static_cast<int>(ptx::load_shared_u32(item(n)));
  }
};

// 0 or 1, of a math thread.
__device__ __forceinline__ int math_warpgroup() {
  return static_cast<int>(threadIdx.x) / 128 - Config::kProducerThreads / 128;
}

// Numbered barriers: of a warp of group 0 and its twin of group 1.
__device__ __forceinline__ int p0_ready() { return 1 + static_cast<int>(threadIdx.x) / 32 % 4; }
__device__ __forceinline__ int p1_ready() { return 5 + static_cast<int>(threadIdx.x) / 32 % 4; }
__device__ __forceinline__ int warp_pair() { return 9 + static_cast<int>(threadIdx.x) / 32 % 4; }
constexpr int kAllMath = 13;

using Line = prefill::TileLine<Config::kBlockN>;

}  // namespace attune::mla
