// SPDX-License-Identifier: Apache-2.0
// The producer of mla/mma.cu: copies key tiles to shared memory by cp.async. Producer warps copy them, or the consumer
// warps do; eight neighbouring lanes copy a row. Each lane looks up one row of the warp, in this tile or in one of the
// next tiles. Missing rows become zeros. Packed rows are copied as codes and dequantized later.
#pragma once

#include "mla/mma/dequant.cuh"
#include "ptx/async_copy.cuh"

namespace attune::mla {

class MmaProducer {
 public:
  __device__ __forceinline__ MmaProducer(const WorkTileParams& p, MmaStorage& shared)
      : p_(p), shared_(shared), begin_(mma_uniform(shared.work.tile_begin)), end_(mma_uniform(shared.work.tile_end)) {}
  // The key tiles of the work tile.
  __device__ __forceinline__ int begin() const { return begin_; }
  __device__ __forceinline__ int end() const { return end_; }

  // For consumer warps without producer warps: start() copies the first tiles of a work tile; advance(i), called beside
  // the GEMMs of tile i, prepares the next tile or a later one.
  __device__ __forceinline__ void start() {
    find(begin_);
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) issue(begin_ + i);
    if constexpr (ProblemConfig::kDequant) dequant(begin_);
  }
  __device__ __forceinline__ void advance(int i) {
    if constexpr (ProblemConfig::kDequant) {
      if (i + 1 < end_) dequant(i + 1);
    } else {
      issue(i + kAhead);
    }
  }
  // Runs advance(i) inside multiply(overlap), which calls overlap(step) in kSteps steps: a chunk of codes is loaded in
  // one step and converted in a later one.
  template <int kSteps, class Multiply>
  __device__ __forceinline__ void advance_overlapped(int i, Multiply multiply) {
    if (i + 1 >= end_) return multiply([](int) {});
    ptx::wait_copies<kAhead - 1>();
    __syncwarp();
    const unsigned thread = mma_thread();
    using Dequant = MmaDequant656<kParts>;
    const Dequant row_dequant(codes_of(thread), tile_at(i + 1), row_of(thread), part_of(thread));
    if (!mma_is_packed(mma_tile_at(shared_.work, i + 1)) || row_dequant.has_large_scale()) {
      mma_dequant<kParts>(p_, shared_, i + 1, codes_of(thread), tile_at(i + 1), row_of(thread), part_of(thread));
      multiply([](int) {});
    } else {
      constexpr int kOfChunk = kSteps / Dequant::kCount;
      static_assert(kOfChunk >= 2 && kSteps % Dequant::kCount == 0, "all chunks have the same number of steps");
      const MmaFactor by = row_dequant.factor(false);
      unsigned codes[4];
      multiply([&](int step) {
        if (step % kOfChunk == 0) row_dequant.load(step / kOfChunk, codes);
        if (step % kOfChunk == kOfChunk - 1) row_dequant.template store<false>(step / kOfChunk, codes, by);
      });
      const unsigned again = mma_thread();
      mma_copy_rope<kParts>(codes_of(again), tile_at(i + 1), row_of(again), part_of(again));
    }
    finish(i + 1);
  }
  // Waits until this warp's rows of the next tile have arrived. Rows of other warps need a barrier.
  __device__ __forceinline__ static void wait() {
    if constexpr (!ProblemConfig::kDequant) ptx::wait_copies<kAhead - 1>();
  }
  // The loop of a producer warp: all tiles of a work tile.
  __device__ __forceinline__ void run() {
    find(begin_);
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) issue(begin_ + i);
    int tile = 0, last = MmaConfig::kTiles - 1;
#pragma unroll 1
    for (int i = begin_; i < end_; ++i) {
      if constexpr (ProblemConfig::kDequant) {
        if (i >= begin_ + MmaConfig::kTiles) MmaBarriers::wait_empty(tile);
        dequant(i);
        MmaBarriers::set_full(tile);
      } else {
        wait();
        MmaBarriers::set_full(tile);
        if (i > begin_ && i + kAhead < end_) MmaBarriers::wait_empty(last);
        issue(i + kAhead);
      }
      last = tile, tile = mma_next(tile, MmaConfig::kTiles);
    }
    ptx::wait_copies<0>();  // the groups that are left are empty
  }

 private:
  static constexpr int kAhead = ProblemConfig::kDequant ? MmaConfig::kStages : MmaConfig::kStages - 1;
  static constexpr int kRowsOfWarp = 32 * MmaConfig::kKeys / MmaConfig::kProducerThreads;
  static_assert(kRowsOfWarp % 4 == 0 && kRowsOfWarp <= 32, "a warp copies four rows at a time");
  static constexpr int kParts = 32 / kRowsOfWarp;  // parts of a row; one lane for each
  // kLookUp: the number of tiles whose rows a warp looks up at once. kKeepsAddresses: lanes keep the addresses of rows
  // in the cache, otherwise page ids or entries of lists.
  static constexpr int kLookUp = 32 / kRowsOfWarp;
  static constexpr bool kKeepsAddresses = MmaConfig::kHasProducerWarps;
  // The first of a warp's rows.
  __device__ __forceinline__ static int first_row(unsigned thread) {
    return static_cast<int>((thread - (MmaConfig::kThreads - MmaConfig::kProducerThreads)) / 32 * kRowsOfWarp);
  }

  // The row that a lane looks up and of which it dequantizes a part.
  __device__ __forceinline__ static int row_of(unsigned thread) {
    return first_row(thread) + static_cast<int>(thread % kRowsOfWarp);
  }
  __device__ __forceinline__ static int part_of(unsigned thread) {
    return static_cast<int>(thread % 32 / kRowsOfWarp);
  }
  // The row's codes of the tile that is dequantized next, and the bf16 tile that they are written to.
  __device__ __forceinline__ unsigned codes_of(unsigned thread) const {
    return ptx::shared_address(shared_.codes[stage_ * MmaConfig::kKeys + row_of(thread)]);
  }
  __device__ __forceinline__ unsigned tile_at(int i) const {
    return ptx::shared_address(shared_.tiles[static_cast<unsigned>(i - begin_) % MmaConfig::kTiles]);
  }
  // The tile, i or a later one, whose row this lane looks up.
  __device__ __forceinline__ static int tile_of(unsigned thread, int i) {
    return i + static_cast<int>(thread % 32 / kRowsOfWarp);
  }

  // Issues the load of the lane's page id or list entry, for issue(i).
  __device__ __forceinline__ void find(int i) {
    const unsigned thread = mma_thread();
    i = tile_of(thread, i);
    index_ = -1;
    if (i >= end_) return;
    const Tile tile = mma_tile_at(shared_.work, i);
    index_ = KvSource(p_, shared_.work, shared_.kv_head, tile).load_index(tile.start + row_of(thread));
  }
  // Computes the address of the lane's row for issue(i). When the look-ups are used up, issues those of the next tiles.
  __device__ __forceinline__ void locate(int i, int slot) {
    if (kKeepsAddresses && slot != 0) return;
    const unsigned thread = mma_thread();
    const Tile tile = mma_tile_at(shared_.work, kKeepsAddresses ? tile_of(thread, i) : i);
    const KvSource source(p_, shared_.work, shared_.kv_head, tile);
    const int key = tile.start + row_of(thread), lane = slot * kRowsOfWarp + static_cast<int>(thread % kRowsOfWarp),
              index = kKeepsAddresses ? index_ : __shfl_sync(0xffffffffu, index_, lane);
    from_ = source.locate(key, index);
    if (ProblemConfig::kProducer == kernels::kMlaDequant584) scales_ = source.scales_of(key, index);
    if (kKeepsAddresses || slot == kLookUp - 1) find(kKeepsAddresses ? i + kLookUp : i + 1);
  }
  // Issues the copies of a tile as one group, which is empty after the last tile.
  __device__ __forceinline__ void issue(int i) {
    if (i < end_) {
      const int slot = (i - begin_) % kLookUp;
      locate(i, slot);
      const unsigned thread = mma_thread();
      const bool has_row = static_cast<int>(thread % 32 / kRowsOfWarp) == (kKeepsAddresses ? slot : 0);
      const int row = row_of(thread);
      if (has_row) shared_.key_exists[i % MmaConfig::kFlags][row] = from_ != nullptr ? 1 : 0;
      if constexpr (!ProblemConfig::kDequant) {
        copy_rows<ProblemConfig::kHeadDimQk / 8, MmaConfig::Layout>(ptx::shared_address(shared_.tiles[stage_]), slot,
                                                                    thread);
      } else if (mma_is_packed(mma_tile_at(shared_.work, i))) {
        const unsigned to = ptx::shared_address(shared_.codes[stage_ * MmaConfig::kKeys]);
        copy_rows<Packed::kRowBytes / 16, PackedLayout>(to, slot, thread);
        if (ProblemConfig::kProducer == kernels::kMlaDequant584 && has_row)
          ptx::copy_async<8>(to + row * MmaConfig::kPackedPitch + Packed::kRowBytes,
                             from_ != nullptr ? from_ + scales_ : p_.q, from_ != nullptr ? 8 : 0);
      }
    }
    ptx::commit_copies();
    stage_ = mma_next(stage_, MmaConfig::kStages);
  }
  // Dequantizes the warp's codes of a tile; then issues the copies of the tile that overwrites them.
  __device__ __forceinline__ void dequant(int i) {
    ptx::wait_copies<kAhead - 1>();
    __syncwarp();
    const unsigned thread = mma_thread();
    mma_dequant<kParts>(p_, shared_, i, codes_of(thread), tile_at(i), row_of(thread), part_of(thread));
    finish(i);
  }
  __device__ __forceinline__ void finish(int i) {
    __syncwarp();  // all lanes have read the codes
    issue(i + kAhead);
  }
  // Copies the warp's rows of a tile that lanes have looked up for this slot. A missing row has the address of q, of
  // which nothing is read; no row is longer than one of q.
  template <int kChunks, class Layout>
  __device__ __forceinline__ void copy_rows(unsigned to, int slot, unsigned thread) const {
    constexpr int kLanes = 8;  // lanes that copy a row
    const auto address = reinterpret_cast<unsigned long long>(from_);
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; r += 32 / kLanes) {
      const int row = r + static_cast<int>(thread % 32 / kLanes), first = static_cast<int>(thread % kLanes);
      const int from_lane = (kKeepsAddresses ? slot * kRowsOfWarp : 0) + row;
      const auto at = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, address, from_lane));
      const char* const chunks = (at != nullptr ? at : p_.q) + 16 * first;
      const int bytes = at != nullptr ? 16 : 0;
      const unsigned lane_to = to + Layout::offset(first_row(thread) + row, first);
#pragma unroll
      for (int i = 0; i < kChunks; i += kLanes) {
        if (kChunks % kLanes == 0 || i + first < kChunks)
          ptx::copy_async<16>(Layout::chunks_on(lane_to, i), chunks + 16 * i, bytes);
      }
    }
  }
  struct PackedLayout {
    __device__ __forceinline__ static int offset(int row, int chunk) {
      return row * MmaConfig::kPackedPitch + 16 * chunk;
    }
    __device__ __forceinline__ static unsigned chunks_on(unsigned at, int step) { return at + 16 * step; }
  };

  const WorkTileParams& p_;
  MmaStorage& shared_;
  const int begin_, end_;
  int index_ = -1, stage_ = 0;             // the look-up of the row after; the stage that is filled next
  const char* from_ = nullptr;             // the row that the lane has looked up
  int scales_ = 0;                         // the offset of its scales if they are not in the row
};

}  // namespace attune::mla
