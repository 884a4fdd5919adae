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
#include "tile/shared_view.cuh"
#include "tile/pipeline_state.cuh"

namespace attune::mla {

using kernels::PrefillParams;
using kernels::WorkTile;
using prefill::Tile;
using prefill::tile_at;
using tile::PipelineState;

struct Config {
  static constexpr int kHeadDimQk = ATTUNE_HEAD_DIM_QK, kHeadDimV = kernels::kMlaHeadDimV;
  static constexpr int kType = ATTUNE_TYPE, kOutType = ATTUNE_OUT_TYPE;
  static constexpr int kLoader = ATTUNE_LOADER;
  static constexpr bool kSparse = ATTUNE_SPARSE != 0;
  static constexpr bool kDense = ATTUNE_DENSE != 0;  // there are rows that are not in a cache
  static constexpr bool kCopiesBoxes = kLoader == kernels::kMlaBoxes, kGathers = kLoader == kernels::kMlaRows,
                        kDecodes = kLoader >= kernels::kMlaCodes656;
  static constexpr int kRows = kernels::kMlaRowsOfBlock, kKeys = kernels::kMlaKeys, kStages = kernels::kMlaStages;
  static constexpr int kChunks = kHeadDimQk / 64, kChunksV = kHeadDimV / 64;  // of 64 channels
  static constexpr int kChunkBytes = kernels::kMlaChunkBytes, kTileBytes = kChunks * kChunkBytes;
  // Of the two math groups each has half of the channels of V.
  static constexpr int kMathWarps = 8, kChannels = kHeadDimV / 2;
  // Blocks that take neighbouring head tiles of a work tile side by side and share the keys that they have copied or
  // decode.
  static constexpr int kCluster = ATTUNE_CLUSTER;
  // What threads have stored must be made visible to products: by those who read it, unless the copy engine reads it
  // too, so that those who store it have done so.
  static constexpr bool kReadersFence = !kCopiesBoxes && kCluster == 1;
  // Threads that bring keys; threads of a block.
  static constexpr int kThreads = kernels::mla_threads(kLoader, kCluster), kLoaders = kThreads - 32 * kMathWarps;
  static constexpr int kWorkReaders = kThreads / 32 - 1;  // warps, without the one that writes
  // Packed rows in pairs of blocks: what is decoded of the next tile waits in registers (mla/producers/dequant_registers.cuh).
  static constexpr bool kHolds = kDecodes && kCluster > 1;
  // Lists of 16-bit rows, and boxes: group 1 has a product under way when it hands over its weights; lists: group 0 one
  // more (mla/m64/mainloop.cuh). That takes registers.
  static constexpr bool kLooksAhead = kGathers && kSparse, kHandsOverFirst = kLooksAhead || kCopiesBoxes;
  static constexpr int kLoaderRegisters = kHandsOverFirst ? 56 : !kDecodes ? 72 : kLoaders == 128 ? 88 : 48;
  static constexpr int kMathRegisters = kDecodes ? 208 : kHandsOverFirst ? 224 : 216;
  static_assert(kLoaders / 128 * kLoaderRegisters + 2 * kMathRegisters <= kThreads / 128 * (65536 / kThreads / 8 * 8),
                "more registers than the block begins with");
  // Words that say which keys nobody sees: those that bring keys row by row have one for eight keys each.
  static constexpr int kHiddenWords = kCopiesBoxes ? 2 : 8;
  static constexpr ptx::Type kProduct = kType == tile::kBFloat16 ? ptx::Type::kBf16 : ptx::Type::kF16;

  static_assert(kCluster == 1 || (kCluster == 2 && (kDecodes || kCopiesBoxes)), "pairs of blocks share boxes or codes");
  static_assert(kType == tile::kBFloat16 || kType == tile::kFloat16, "wgmma takes 16-bit elements here");
  static_assert(kHeadDimQk == kHeadDimV || kHeadDimQk == kHeadDimV + 64, "channels beyond V's are one part");
  static_assert(!kDecodes || kType == tile::kBFloat16, "codes become bf16");
  static_assert(!(kSparse && kCopiesBoxes), "boxes hold neighbours");
};

// Of the packed format, where the cache has one.
using Packed = tile::MlaRow<Config::kLoader == kernels::kMlaCodes584 ? 584 : 656>;

// A tile's channels come, and are multiplied, in parts: first those that are in K only, then quarters of V.
struct Part {
  int chunk, count;  // of 64 channels
};
constexpr int kParts = kernels::kMlaParts;
__device__ __forceinline__ constexpr Part part_at(int i) {
  return i == 0 ? Part{Config::kChunksV, Config::kChunks - Config::kChunksV} : Part{2 * i - 2, 2};
}
// Whether they are handed over by halves of V. Of a tile of math group 1 the half that it frees itself comes first
// then, as it is free before the other.
constexpr bool kByHalves = Config::kGathers || Config::kHolds;
// The order in which they come. second: in a tile of math group 1.
__device__ __forceinline__ constexpr int part_in_turn(int i, bool second) {
  if (Config::kDecodes && !kByHalves && i >= 2) return i == 4 ? 2 : i + 1;
  return kByHalves && second && i > 0 ? (i + 1) % 4 + 1 : i;
}
// Halves have fewer barriers: what is in K only, and each half of V at the second of its parts.
__device__ __forceinline__ constexpr bool is_first_handed_over(int part) {
  return !kByHalves || part % 2 == 1 || part == 0;
}
__device__ __forceinline__ constexpr int barrier_of(int part) { return kByHalves ? (part + 1) / 2 * 2 : part; }
// What lies beside a tile comes with this one.
constexpr int kNotedPart = part_at(0).count != 0 ? 0 : 2;
// Of a tile's buffer: what is in K only, and the halves of V. Part i is in buffer half_of(i).
constexpr int kKeysOnly = 0;
__device__ __forceinline__ constexpr int half_of(int part) { return (part + 1) / 2; }

// Stage and parity of a tile's buffer, by the tiles before it, of all work tiles.
static_assert(Config::kStages == 2, "stages and parities are bits of the count");
__device__ __forceinline__ PipelineState turn_of(unsigned tiles) {
  return {static_cast<int>(tiles % 2), tiles / 2 % 2};
}

__device__ __forceinline__ int slot_of_work(unsigned count) {
  return static_cast<int>(count % kernels::kWorkSlots);
}

// What a math thread counts, in one register, as registers are scarce: work tiles, and modulo 4 the tiles of all work
// tiles.
class Counts {
 public:
  __device__ __forceinline__ unsigned work_tiles() const { return word_ >> 2; }
  __device__ __forceinline__ int slot() const { return slot_of_work(work_tiles()); }
  __device__ __forceinline__ void next_work() { word_ += 4; }
  // What has been derived from the count is derived anew, rather than kept in registers.
  __device__ __forceinline__ void forget() { word_ = ptx::kept(word_); }
  __device__ __forceinline__ PipelineState pipe(unsigned ahead) const { return turn_of(word_ + ahead & 3); }
  __device__ __forceinline__ void go_on(unsigned tiles) { word_ = (word_ & ~3u) | (word_ + tiles & 3); }

 private:
  unsigned word_ = 0;
};

// The page of a slot or a key of a pool.
__device__ __forceinline__ int page_of(const kernels::RowPool& pool, int x) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(x)) * pool.page_magic >>
                          pool.page_shift);
}

// Of a row of keys: where it begins, null where there is none; and MLA-584's scales, how far from there.
struct RowPlace {
  const char* row;
  int scales;
};

using SharedStorage = kernels::MlaStorage<Config::kHeadDimQk, Config::kHiddenWords>;
static_assert(sizeof(SharedStorage) == kernels::mla_shared_bytes(Config::kLoader, Config::kHeadDimQk),
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
  __device__ __forceinline__ unsigned weights(int thread, int piece) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, weights, piece, thread);
  }
  __device__ __forceinline__ unsigned reference(int group, int row) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, references, group, row);
  }
  __device__ __forceinline__ float2* stats(int group) const {
    // Two products: with one ptxas spills.
    return reinterpret_cast<float2*>(memory + ATTUNE_OFFSET_OF(SharedStorage, row_stats) +
                                     group * static_cast<int>(sizeof(SharedStorage::row_stats[0])) +
                                     threadIdx.x / 4 % 32 * sizeof(kernels::MlaRowStats));
  }
  // Keys [first, end) that a row may see.
  __device__ __forceinline__ int2* limits(int row) const {
    return &this->template value_at<int2>(ATTUNE_OFFSET_OF(SharedStorage, limits), row);
  }
  __device__ __forceinline__ unsigned plain_tiles() const { return ATTUNE_SHARED_AT(SharedStorage, plain_tiles); }
  // kernels::MlaTileNote; its words behind those of hidden keys are the tile's first key, and whether it is an edge.
  __device__ __forceinline__ unsigned note(int stage) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, notes, stage);
  }
  __device__ __forceinline__ unsigned k_full(int stage, int part) const {
    return ATTUNE_SHARED_AT_INDICES(SharedStorage, barriers.k_full, stage, part);
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
  __device__ __forceinline__ unsigned edge(int warp) const {
    return ATTUNE_SHARED_AT_INDEX(SharedStorage, barriers.edge, warp);
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
__device__ __forceinline__ int math_group() { return static_cast<int>(threadIdx.x) / 128 - Config::kLoaders / 128; }

// Numbered barriers: of a warp of group 0 and its twin of group 1.
__device__ __forceinline__ int first_is_ready() { return 1 + static_cast<int>(threadIdx.x) / 32 % 4; }
__device__ __forceinline__ int second_is_ready() { return 5 + static_cast<int>(threadIdx.x) / 32 % 4; }
__device__ __forceinline__ int twins() { return 9 + static_cast<int>(threadIdx.x) / 32 % 4; }
constexpr int kAllMath = 13;

using Line = prefill::TileLine<Config::kKeys>;

}  // namespace attune::mla
