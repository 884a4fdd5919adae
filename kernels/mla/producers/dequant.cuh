// SPDX-License-Identifier: Apache-2.0
// What both dequant producers share (mla/producers/dequant_shared.cuh, mla/producers/dequant_registers.cuh): they
// locate rows, mask invalid ones, and load rows outside of a cache.
//
// A warp has eight rows of every tile; four lanes dequantize a row. In a cluster each block has half of the rows. Rows
// of four tiles are located at a time, one tile by each of the four lanes.
#pragma once

#include "mla/producers/cached_source.cuh"
#include "mla/producers/gather.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

// Read instead of invalid rows: codes and scales of zero.
static __device__ const uint4 kNoRow[(Packed::kRowBytes + 15) / 16] = {};

class DequantProducer {
 protected:
  static constexpr bool k656 = Config::kProducer != kernels::kMlaDequant584;
  static constexpr int kRowsOfBlock = Config::kBlockN / Config::kCluster;  // rows of a tile that this block dequantizes
  static constexpr int kLanes = 4, kRowsOfWarp = 32 / kLanes;              // lanes that dequantize a row
  static constexpr int kTilesLocated = kLanes;                             // tiles that are located together
  static_assert(!Config::kDequant || Config::kProducerThreads / 32 * kRowsOfWarp == kRowsOfBlock,
                "a lane locates one row of a tile");

  // Slices 1 to 4 have 128 fp8 channels each. In 584 the last slice has 64, and the rope channels; in 656 the rope
  // channels are a separate slice.
  static constexpr int kRopeChunk = Packed::kNope / 64, kRopeSlice = k656 ? 0 : 4;
  static constexpr int kFirstSlice = k656 ? 0 : 1;
  __device__ __forceinline__ static constexpr unsigned chunks_of(int slice) { return slice < 4 || k656 ? 2 : 1; }

  __device__ __forceinline__ DequantProducer(const WorkTileParams& p, const Smem& smem)
      : p_(p), smem_(smem), thread_(Config::kRegisterStaged ? shuffled_thread() : ptx::opaque(threadIdx.x)) {}

  // By a shuffle, because otherwise ptxas reads threadIdx at each use, 100 clocks each.
  __device__ __forceinline__ static unsigned shuffled_thread() {
    return __shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32));
  }

  // Recomputed at each use: registers are scarce.
  __device__ __forceinline__ unsigned lane() const { return ptx::opaque(thread_) % 32; }
  __device__ __forceinline__ unsigned first_row() const {
    return (Config::kCluster > 1 ? ptx::cluster_rank() * kRowsOfBlock : 0) + ptx::opaque(thread_) / 32 * kRowsOfWarp;
  }
  // The row that the lane dequantizes together with three neighbours. Each of the four locates it in another tile.
  __device__ __forceinline__ unsigned dequant_row() const { return first_row() + lane() / kLanes; }
  __device__ __forceinline__ int located_tile() const { return static_cast<int>(lane() % kLanes); }
  // The offset in a chunk that the lane writes to: the first of two adjacent units of 16 bytes, swizzled.
  __device__ __forceinline__ unsigned units() const {
    return dequant_row() * 128 + ((lane() % kLanes * 2) ^ (dequant_row() & 7)) * 16;
  }

  // Loads tiles outside of a cache, which come last in a sequence. Returns the tile before them. after_first: called
  // when the first of them has arrived.
  template <class AfterFirst>
  __device__ __forceinline__ int load_uncached(const WorkTile& work, int head_tile, AfterFirst&& after_first) {
    int i = work.tile_end - 1;
    if constexpr (Config::kDense && !Config::kSparse) {
#pragma unroll 1
      for (; i >= work.tile_begin && !tile_of(work, i).cached; --i) {
        load_dense_tile(work, head_tile, i);
        if (i == work.tile_end - 1) after_first();
      }
    }
    return i;
  }
  // Locates the rows of tile i, the work tile's first cached tile, and of the tiles before it.
  __device__ __forceinline__ void locate_first(const CachedSource& rows, const WorkTile& work, int i) {
    load_index(rows, i, work.tile_begin);
    if (!Config::kSparse && thread_ < 32) find_unmasked(work);
    position_ = kTilesLocated - 1;
    advance(rows, i, work.tile_begin);
  }
  // Moves to tile i, if there is one: locates its rows and those of the tiles before it, unless they have been located,
  // and prefetches them to L2.
  __device__ __forceinline__ void advance(const CachedSource& rows, int i, int tile_begin) {
    position_ = (position_ + 1) % kTilesLocated;
    if (position_ == 0) {
      const int own = i - located_tile();
      located_ = rows.locate(max(own, tile_begin), static_cast<int>(dequant_row()), index_);
      const bool there = located_.row != nullptr && own >= tile_begin;
      if (!there) located_ = {reinterpret_cast<const char*>(kNoRow), 0};
      invalid_ = __ballot_sync(0xffffffffu, !there);
      load_index(rows, i - kTilesLocated, tile_begin);
    }
    // The four lanes that dequantize a row prefetch its lines.
    const char* const row = own_row() + located_tile() * 128;
#pragma unroll
    for (int byte = 0; byte < Packed::kRowBytes; byte += 128 * kTilesLocated) {
      if (byte + located_tile() * 128 < Packed::kRowBytes) ptx::prefetch_line(row + byte);
    }
  }
  // For the next tile: the lane's row; its scales (one, in 584 two).
  __device__ __forceinline__ const char* own_row() const { return row_of(located_.row, position_, kLanes); }
  __device__ __forceinline__ unsigned load_scales(const char* row) const {
    if constexpr (k656) {
      return ptx::load_early(reinterpret_cast<const unsigned*>(row + Packed::kNope) + lane() % kLanes);
    } else {
      const char* const scales = row + __shfl_sync(0xffffffffu, located_.scales, position_, kLanes);
      return ptx::load_early(reinterpret_cast<const unsigned short*>(scales) + lane() % kLanes);
    }
  }
  // For the next tile: row i of the warp.
  __device__ __forceinline__ const char* located_row(unsigned i) const {
    return row_of(located_.row, kLanes * i + position_, 32);
  }
  // The next tile's invalid rows: bit 4 i is row i; other bits have no meaning.
  __device__ __forceinline__ unsigned invalid_rows() const { return invalid_ >> position_; }

  // Finds the work tile's tiles of which all rows see all keys. Runs once a work tile, because the first warp would be
  // the last to dequantize if it tested every tile.
  __device__ __forceinline__ void find_unmasked(const WorkTile& t) {
    const KeyRange keys = cached_keys_of_all_rows(p_, t);
    if (thread_ != 0) return;
    const int before = t.first_key / Config::kBlockN;
    ptx::store_shared_u32(unmasked(), (keys.begin + Config::kBlockN - 1) / Config::kBlockN - before);
    ptx::store_shared_u32(unmasked() + 4, keys.end / Config::kBlockN - before);
  }
  // [begin, end) of these tiles, in shared memory: only the first thread needs them, and it has no registers to spare.
  __device__ __forceinline__ unsigned unmasked() const { return smem_.unmasked_tiles(); }
  // As store_tile_start().
  __device__ __forceinline__ void store_needs_row_mask(const WorkTile& work, int i, int stage) const {
    if (Config::kSparse || thread_ != 0) return;
    const unsigned at = smem_.mask(stage) + 4 * Config::kMaskWords;
    const bool needs_mask = i < static_cast<int>(ptx::load_shared_u32(unmasked())) ||
                            i >= static_cast<int>(ptx::load_shared_u32(unmasked() + 4));
    if (needs_mask) {
      const int start = (work.first_key / Config::kBlockN + i) * Config::kBlockN;
      ptx::store_shared_u32(at, static_cast<unsigned>(start));
    }
    ptx::store_shared_u32(at + 4, needs_mask ? 1 : 0);
  }
  // Masks the warp's invalid rows. to_other: also in the other block, counted at its first full barrier.
  __device__ __forceinline__ void store_row_mask(int stage, unsigned invalid, unsigned to_other) const {
    if (lane() != 0) return;
    invalid &= 0x11111111;
    invalid = (invalid | invalid >> 3) & 0x03030303;
    invalid = (invalid | invalid >> 6) & 0x000f000f;
    invalid = (invalid | invalid >> 12) & 0xff;
    const unsigned word = first_row() / 8;
    const unsigned at = smem_.mask(stage) + 4 * word, x = invalid << (word % 4 * 8);
    ptx::store_shared_u32(at, x);
    if constexpr (Config::kCluster > 1)
      ptx::store_async(at + to_other, x, smem_.k_full(stage, barrier_of(kFirstSlice)) + to_other);
  }

  // Writes a lane's fp8 channels of a chunk as bf16, to two neighbouring units. line: the address of the first unit.
  __device__ __forceinline__ static void write_chunk(unsigned line, const unsigned (&fp8)[4], float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned out[4];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint2 halves = ptx::four_e4m3_to_f16(fp8[2 * half + w]);
        out[2 * w] = scale_two(halves.x, factor);
        out[2 * w + 1] = scale_two(halves.y, factor);
      }
      ptx::store_shared_four(line ^ (16 * half), out);
    }
  }
  // scale: of a slice; in 584 the scales of its two chunks.
  __device__ __forceinline__ static float factor_of_chunk(unsigned scale, unsigned chunk) {
    return k656 ? __uint_as_float(scale) : common::e8m0_to_float(scale >> (8 * chunk) & 0xff);
  }

  const WorkTileParams& p_;
  const Smem& smem_;
  const unsigned thread_;
  unsigned num_started_ = 0;  // tiles so far, over all work tiles

 private:
  // What lane `lane` of each `width` lanes has located.
  __device__ __forceinline__ static const char* row_of(const char* located, unsigned lane, int width) {
    return reinterpret_cast<const char*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(located), lane, width));
  }
  // Scales two fp16 numbers and rounds them to bf16.
  __device__ __forceinline__ static unsigned scale_two(unsigned halves, float factor) {
    return ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(halves)) * factor,
                          ptx::f16_to_float(static_cast<unsigned short>(halves >> 16)) * factor);
  }
  // Loads the indices of the rows of tile i, and of the tiles before it that are located with it.
  __device__ __forceinline__ void load_index(const CachedSource& rows, int i, int tile_begin) {
    i -= located_tile();
    if (i >= tile_begin) index_ = rows.load_index(i, static_cast<int>(dequant_row()));
  }
  __device__ __forceinline__ void load_dense_tile(const WorkTile& work, int head_tile, int i) {
    GatherCopies copies(p_, smem_);
    const PipelineState pipe = pipeline_state(num_started_++);
    copies.locate(work, head_tile, i, copies.load_index(work, head_tile, i));
    copies.copy_tile(pipe, work, i);
    ptx::commit_copies();
    ptx::wait_copies<0>();
    if (!Config::kConsumerFence) ptx::fence_async_proxy();
    __syncwarp();
    if (ptx::elect()) {
#pragma unroll
      for (int slice = kFirstSlice; slice < kSlices; ++slice) {
        if (barrier_of(slice) == slice) ptx::arrive(smem_.k_full(pipe.stage, slice));
      }
    }
    __syncwarp();
  }

  int index_ = -1;        // of the row that is located next
  unsigned position_;     // of the next tile, among the tiles that are located together
  RowAddress located_;    // the lane's row in one of these tiles
  unsigned invalid_ = 0;  // a bit for each lane whose row is invalid
};

}  // namespace attune::mla
