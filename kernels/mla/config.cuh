// SPDX-License-Identifier: Apache-2.0
// The configuration of the MLA kernels for Hopper, and the shared addresses of the M = 64 kernel.
#pragma once

#include "common/masks.cuh"
#include "common/pipeline_state.cuh"
#include "common/shared_view.cuh"
#include "common/stamp.cuh"
#include "mla/problem.cuh"
#include "mla/shared_storage.h"
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"

namespace attune::mla {

using common::PipelineState;

// The masks of use::kCompiledMasks. If it is not defined, there are none.
#ifndef ATTUNE_MASK
using KeyMask = common::KeyMask<0>;
#else
using KeyMask = common::KeyMask<ATTUNE_MASK>;
#endif

struct Config : ProblemConfig {
  static constexpr int kBlockM = kernels::kMlaBlockM, kBlockN = kernels::kMlaBlockN, kStages = kernels::kMlaStages;
  static constexpr int kChunks = kHeadDimQk / 64, kChunksV = kHeadDimV / 64;  // chunks of 64 channels
  static constexpr int kChunkBytes = kernels::kMlaChunkBytes, kTileBytes = kChunks * kChunkBytes;
  // Each of the two consumer warpgroups has half of V's channels.
  static constexpr int kConsumerWarps = 8, kChannels = kHeadDimV / 2;
  // Cluster size: blocks with neighbouring head tiles of one work tile share copied or dequantized keys.
  static constexpr int kCluster = ATTUNE_CLUSTER;
  // Stores by threads must become visible to wgmma (async proxy). The consumers fence, unless the copy engine reads the
  // rows too; then the producers have fenced.
  static constexpr bool kConsumerFence = !kTma && kCluster == 1;
  // Producer threads; threads of a block.
  static constexpr int kThreads = kernels::mla_threads(kProducer, kCluster),
                       kProducerThreads = kThreads - 32 * kConsumerWarps;
  // warps that read work tiles: all but the one that writes them
  static constexpr int kWorkReaders = kThreads / 32 - 1;
  // Clusters on packed rows: fp8 of the next tile wait in registers (mla/producers/dequant_registers.cuh).
  static constexpr bool kRegisterStaged = kDequant && kCluster > 1;
  // kPublishPEarly: warpgroup 1 publishes P while a PV GEMM still runs (gathered sparse rows, TMA boxes).
  // kOverlapNextQK: warpgroup 0 also issues the next QK GEMM early (gathered sparse rows; mla/m64/mainloop.cuh). Both
  // take registers.
  static constexpr bool kOverlapNextQK = kGather && kSparse, kPublishPEarly = kOverlapNextQK || kTma;
  static constexpr int kProducerRegisters = kPublishPEarly ? 56 : !kDequant ? 72 : kProducerThreads == 128 ? 88 : 48;
  static constexpr int kConsumerRegisters = kDequant ? 208 : kPublishPEarly ? 224 : 216;
  static_assert(kProducerThreads / 128 * kProducerRegisters + 2 * kConsumerRegisters <=
                    kThreads / 128 * (65536 / kThreads / 8 * 8),
                "more registers than the block begins with");
  // Words of masked-key bits: producers of single rows write one word for each eight keys.
  static constexpr int kMaskWords = kTma ? 2 : 8;
  static constexpr ptx::Type kMmaType = kType == common::kBFloat16 ? ptx::Type::kBf16 : ptx::Type::kF16;

  static_assert(kCluster == 1 || (kCluster == 2 && (kDequant || kTma)), "pairs share TMA boxes or dequantized rows");
  static_assert(!(kSparse && kTma), "a TMA box has adjacent keys, a list has not");
  static_assert(!(kSparse && KeyMask::kAny), "with lists there are no key masks");
};

// Channels of a tile arrive, and enter the GEMMs, in slices: slice 0 has the channels that only K has (rope), slices 1
// to 4 are the quarters of V.
struct Slice {
  int chunk, count;  // in chunks of 64 channels
};
constexpr int kSlices = kernels::kMlaSlices;
__device__ __forceinline__ constexpr Slice slice_at(int i) {
  return i == 0 ? Slice{Config::kChunksV, Config::kChunks - Config::kChunksV} : Slice{2 * i - 2, 2};
}
// Whether there is one full barrier for each half of V. If so, tiles of warpgroup 1 fill the second half of V first:
// warpgroup 1 itself frees that half, before warpgroup 0 frees the other.
constexpr bool kSignalByHalf = Config::kGather || Config::kRegisterStaged;
// The order in which slices arrive. second: in a tile of warpgroup 1.
__device__ __forceinline__ constexpr int slice_in_order(int i, bool second) {
  if (Config::kDequant && !kSignalByHalf && i >= 2) return i == 4 ? 2 : i + 1;
  return kSignalByHalf && second && i > 0 ? (i + 1) % 4 + 1 : i;
}
// With kSignalByHalf slice 0 has a barrier, and each half of V has one, at its second slice.
__device__ __forceinline__ constexpr bool has_full_barrier(int slice) {
  return !kSignalByHalf || slice % 2 == 1 || slice == 0;
}
__device__ __forceinline__ constexpr int barrier_of(int slice) { return kSignalByHalf ? (slice + 1) / 2 * 2 : slice; }
// The slice whose "full" barrier covers the mask.
constexpr int kMaskSlice = slice_at(0).count != 0 ? 0 : 2;
// Regions of a stage, each with an empty barrier: 0 has the rope channels, 1 and 2 have the halves of V. Slice i is in
// region half_of(i).
constexpr int kKOnly = 0;
__device__ __forceinline__ constexpr int half_of(int slice) { return (slice + 1) / 2; }

// Stage and phase of a tile, from the number of tiles before it, over all work tiles.
static_assert(Config::kStages == 2, "stages and parities are bits of the count");
__device__ __forceinline__ PipelineState pipeline_state(unsigned tiles) {
  return {static_cast<int>(tiles % 2), tiles / 2 % 2};
}

__device__ __forceinline__ int slot_of_work(unsigned count) { return static_cast<int>(count % kernels::kWorkSlots); }

// A consumer thread's counters in one register, because registers are scarce: work tiles, and key tiles over all work
// tiles modulo 4.
class TileCounts {
 public:
  __device__ __forceinline__ unsigned work_tiles() const { return word_ >> 2; }
  __device__ __forceinline__ int slot() const { return slot_of_work(work_tiles()); }
  __device__ __forceinline__ void next_work() { word_ += 4; }
  // Makes the compiler recompute what follows from the count, rather than keep it in registers.
  __device__ __forceinline__ void refresh() { word_ = ptx::opaque(word_); }
  __device__ __forceinline__ PipelineState pipe(unsigned ahead) const { return pipeline_state(word_ + ahead & 3); }
  __device__ __forceinline__ void advance(unsigned tiles) { word_ = (word_ & ~3u) | (word_ + tiles & 3); }

 private:
  unsigned word_ = 0;
};

// The address of a key's row, null if it has none; and the offset of its scales from there (MLA-584).
struct RowAddress {
  const char* row;
  int scales;
};

using SharedStorage = kernels::MlaStorage<Config::kHeadDimQk, Config::kMaskWords>;
static_assert(sizeof(SharedStorage) == kernels::mla_shared_bytes(Config::kProducer, Config::kHeadDimQk),
              "the host asks for another size");
static_assert(sizeof(SharedStorage) <= kernels::kMostSharedBytes, "more shared memory than a block can have");

// Shared addresses.
struct Smem : common::SharedView<SharedStorage> {
  using SharedView::SharedView;
  __device__ __forceinline__ unsigned q() const { return ATTUNE_SHARED_AT(SharedStorage, q); }
  __device__ __forceinline__ unsigned k(int stage) const { return ATTUNE_SHARED_AT_INDEX(SharedStorage, k, stage); }
  // P of a consumer thread, four vectors of 16 bytes.
  __device__ __forceinline__ unsigned p(int thread, int vector) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, p, vector, thread);
  }
  __device__ __forceinline__ unsigned row_max_ref(int group, int row) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, row_max_refs, group, row);
  }
  __device__ __forceinline__ float2* stats(int group) const {
    // Two multiplications, because with one ptxas spills.
    return reinterpret_cast<float2*>(memory + ATTUNE_OFFSET_OF(SharedStorage, row_stats) +
                                     group * static_cast<int>(sizeof(SharedStorage::row_stats[0])) +
                                     threadIdx.x / 4 % 32 * sizeof(kernels::MlaRowStats));
  }
  // The keys [first, end) that a row sees.
  __device__ __forceinline__ int2* row_limits(int row) const {
    return &this->template value_at<int2>(ATTUNE_OFFSET_OF(SharedStorage, row_limits), row);
  }
  __device__ __forceinline__ unsigned unmasked_tiles() const { return ATTUNE_SHARED_AT(SharedStorage, unmasked_tiles); }
  // kernels::MlaTileMask. After the words of masked keys come the tile's first key and needs_row_mask.
  __device__ __forceinline__ unsigned mask(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, masks, stage);
  }
  __device__ __forceinline__ unsigned k_full(int stage, int slice) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, barriers.k_full, stage, slice);
  }
  __device__ __forceinline__ unsigned k_empty(int stage, int half) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, barriers.k_empty, stage, half);
  }
  __device__ __forceinline__ unsigned q_full() const { return ATTUNE_SHARED_AT(SharedStorage, barriers.q_full); }
  __device__ __forceinline__ unsigned q_empty() const { return ATTUNE_SHARED_AT(SharedStorage, barriers.q_empty); }
  __device__ __forceinline__ unsigned partial_full(int warp) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.partial_full, warp);
  }

  // In a cluster: the distance from a shared address to the same offset in the other block.
  __device__ __forceinline__ unsigned to_other() const { return scheduler::to_other_block(*this); }
  // For scheduler/tile_idx_ring.cuh. Four entries suffice: while it loads work tile n - 1, the first block sends index
  // n. Its last copy went to a stage that both blocks released after work tile n - 4 or a later one, so the other block
  // has read index n - 4, which had the same entry.
  static constexpr unsigned kTileIdxSlots = kernels::kMlaTileIdxSlots;
  __device__ __forceinline__ unsigned tile_idx(unsigned n) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, tile_idx, n % kTileIdxSlots);
  }
  __device__ __forceinline__ unsigned tile_idx_full(unsigned n) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.tile_idx_full, n % kTileIdxSlots);
  }
};

// The shared addresses that the m16 and the swap-AB kernel have in common: rows as they are in the cache.
template <class Storage>
struct CachedRowsView : common::SharedView<Storage> {
  using common::SharedView<Storage>::SharedView;
  using common::SharedView<Storage>::base;
  __device__ __forceinline__ unsigned row(int stage, int key) const {
    return ATTUNE_SHARED_AT_INDICES(Storage, tiles, stage, key);
  }
  // kernels::MlaCachedTileMask, whose first words are `masked`.
  __device__ __forceinline__ unsigned mask(int stage) const { return ATTUNE_SHARED_AT_INDEX(Storage, masks, stage); }
  __device__ __forceinline__ unsigned row_source(int key) const {
    return ATTUNE_SHARED_AT_INDEX(Storage, row_sources, key);
  }
  __device__ __forceinline__ unsigned row_sums(int row) const {
    return ATTUNE_SHARED_AT_INDEX(Storage, row_sums, row);
  }
  __device__ __forceinline__ unsigned full(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(Storage, barriers.full, stage);
  }
  __device__ __forceinline__ unsigned empty(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(Storage, barriers.empty, stage);
  }
};

// The consumer warpgroup of this thread, 0 or 1.
__device__ __forceinline__ int consumer_warpgroup() {
  return static_cast<int>(threadIdx.x) / 128 - Config::kProducerThreads / 128;
}

// Named barriers of a pair of warps: a warp of warpgroup 0 and the warp with the same number of warpgroup 1.
__device__ __forceinline__ int p0_ready() { return 1 + static_cast<int>(threadIdx.x) / 32 % 4; }
__device__ __forceinline__ int p1_ready() { return 5 + static_cast<int>(threadIdx.x) / 32 % 4; }
__device__ __forceinline__ int warp_pair() { return 9 + static_cast<int>(threadIdx.x) / 32 % 4; }
constexpr int kAllConsumers = 13;

using KeyTiles = scheduler::KeyTiles<Config::kBlockN>;

}  // namespace attune::mla
