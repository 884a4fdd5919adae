// SPDX-License-Identifier: Apache-2.0
// What threads that decode rows of the packed formats do alike, wherever codes wait to be decoded
// (mla/producers/dequant_shared.cuh, mla/producers/dequant_registers.cuh): finding rows, telling what is not there, and
// loading rows that are not in a cache.
//
// A warp has eight rows of every tile, from the first byte to the last; four lanes decode a row. In a cluster each
// block has half of the rows. The rows of four tiles are found at a time, one by each of these lanes.
#pragma once

#include "mla/producers/cached_source.cuh"
#include "mla/producers/gather.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

// In place of rows that are not there: codes and scales of zero.
static __device__ const uint4 kNoRow[(Packed::kRowBytes + 15) / 16] = {};

class DequantProducer {
 protected:
  static constexpr bool k656 = Config::kProducer != kernels::kMlaDequant584;
  static constexpr int kRowsOfCta = Config::kBlockN / Config::kCluster;  // that it decodes
  static constexpr int kLanes = 4, kRowsOfWarp = 32 / kLanes;            // lanes that decode a row
  static constexpr int kFound = kLanes;                                  // tiles whose rows are found together
  static_assert(!Config::kDequant || Config::kProducerThreads / 32 * kRowsOfWarp == kRowsOfCta,
                "a lane has one row of a tile");

  // Parts 1 to 4 are 128 codes each; of 584 the last is 64 codes and the rope part, which is a part of its own in 656.
  static constexpr int kRopeChunk = Packed::kNope / 64, kRopeSlice = k656 ? 0 : 4;
  static constexpr int kFirstSlice = k656 ? 0 : 1;
  __device__ __forceinline__ static constexpr unsigned chunks_of(int slice) { return slice < 4 || k656 ? 2 : 1; }

  __device__ __forceinline__ DequantProducer(const PrefillParams& p, const Smem& smem)
      : p_(p), smem_(smem), thread_(Config::kRegisterStaged ? shuffled_thread() : ptx::kept(threadIdx.x)) {}

  // By way of a shuffle: ptxas would ask for it again wherever it is used, which takes 100 clocks.
  __device__ __forceinline__ static unsigned shuffled_thread() {
    return __shfl_sync(0xffffffffu, threadIdx.x, static_cast<int>(threadIdx.x % 32));
  }

  // Computed anew wherever it is asked for, with what follows from it, as registers are scarce.
  __device__ __forceinline__ unsigned lane() const { return ptx::kept(thread_) % 32; }
  __device__ __forceinline__ unsigned first_row() const {
    return (Config::kCluster > 1 ? ptx::cluster_rank() * kRowsOfCta : 0) + ptx::kept(thread_) / 32 * kRowsOfWarp;
  }
  // The row that the lane decodes with its three neighbours. It finds that of one of four tiles.
  __device__ __forceinline__ unsigned dequant_row() const { return first_row() + lane() / kLanes; }
  __device__ __forceinline__ int found_tile() const { return static_cast<int>(lane() % kLanes); }
  // Where the lane writes, in a chunk: the first of two neighbouring units of 16 bytes.
  __device__ __forceinline__ unsigned units() const {
    return dequant_row() * 128 + ((lane() % kLanes * 2) ^ (dequant_row() & 7)) * 16;
  }

  // Loads tiles that are not in a cache, which come last in the line; returns the tile before them. after_first: to be
  // called when the first has come.
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
  // Finds the rows of tile i, the first of a work tile that are decoded, and those of the tiles before it.
  __device__ __forceinline__ void locate_first(const CachedSource& rows, const WorkTile& work, int i) {
    load_index(rows, i, work.tile_begin);
    if (!Config::kSparse && thread_ < 32) find_unmasked(work);
    position_ = kFound - 1;
    advance(rows, i, work.tile_begin);
  }
  // Tile i is next: finds its rows, with those of the tiles before it, unless they have been, and has the L2 fetch
  // them. None where there is no such tile.
  __device__ __forceinline__ void advance(const CachedSource& rows, int i, int tile_begin) {
    position_ = (position_ + 1) % kFound;
    if (position_ == 0) {
      const int own = i - found_tile();
      found_ = rows.locate(max(own, tile_begin), static_cast<int>(dequant_row()), index_);
      const bool there = found_.row != nullptr && own >= tile_begin;
      if (!there) found_ = {reinterpret_cast<const char*>(kNoRow), 0};
      invalid_ = __ballot_sync(0xffffffffu, !there);
      load_index(rows, i - kFound, tile_begin);
    }
    // A row's lines are spread over the four lanes that decode it.
    const char* const row = own_row() + found_tile() * 128;
#pragma unroll
    for (int byte = 0; byte < Packed::kRowBytes; byte += 128 * kFound) {
      if (byte + found_tile() * 128 < Packed::kRowBytes) ptx::prefetch_line(row + byte);
    }
  }
  // Of the next tile: the lane's row, and what it has of its scales: one, of 584 two.
  __device__ __forceinline__ const char* own_row() const { return row_of(found_.row, position_, kLanes); }
  __device__ __forceinline__ unsigned load_scales(const char* row) const {
    if constexpr (k656) {
      return ptx::load_early(reinterpret_cast<const unsigned*>(row + Packed::kNope) + lane() % kLanes);
    } else {
      const char* const scales = row + __shfl_sync(0xffffffffu, found_.scales, position_, kLanes);
      return ptx::load_early(reinterpret_cast<const unsigned short*>(scales) + lane() % kLanes);
    }
  }
  // Of the next tile: row i of the warp's.
  __device__ __forceinline__ const char* found_row(unsigned i) const {
    return row_of(found_.row, kLanes * i + position_, 32);
  }
  // Of the next tile's rows, which are not there: a bit of each four lanes, of some that means nothing.
  __device__ __forceinline__ unsigned invalid_rows() const { return invalid_ >> position_; }

  // The work tile's tiles of which all of the block's rows see all keys: found once, as the first warp would be the
  // last to have its rows decoded if it asked at every tile.
  __device__ __forceinline__ void find_unmasked(const WorkTile& t) {
    const int position = t.num_keys - t.num_q + t.token_begin;
    const int low = max(t.first_key, prefill::first_visible(p_, position + t.num_tokens - 1));
    const int high = min(min(t.end_key, t.num_cached), prefill::end_visible(p_, t.num_keys, position));
    if (thread_ != 0) return;
    ptx::store_shared_u32(unmasked(), (low + Config::kBlockN - 1) / Config::kBlockN - t.first_key / Config::kBlockN);
    ptx::store_shared_u32(unmasked() + 4, high / Config::kBlockN - t.first_key / Config::kBlockN);
  }
  // [begin, end) of them, of no use but to the first thread, which has no registers for them.
  __device__ __forceinline__ unsigned unmasked() const { return smem_.unmasked_tiles(); }
  // As note_tile().
  __device__ __forceinline__ void store_needs_row_mask(const WorkTile& work, int i, int stage) const {
    if (Config::kSparse || thread_ != 0) return;
    const unsigned at = smem_.mask(stage) + 4 * Config::kMaskWords;
    const bool edge = i < static_cast<int>(ptx::load_shared_u32(unmasked())) ||
                      i >= static_cast<int>(ptx::load_shared_u32(unmasked() + 4));
    if (edge) {
      const int start = (work.first_key / Config::kBlockN + i) * Config::kBlockN;
      ptx::store_shared_u32(at, static_cast<unsigned>(start));
    }
    ptx::store_shared_u32(at + 4, edge ? 1 : 0);
  }
  // Tells the math groups which rows are not there; to_other: those of the other block, too, by their first barrier.
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

  // A lane's codes of a chunk, to two neighbouring units. line: the chunk's first, in its buffer.
  __device__ __forceinline__ static void write_chunk(unsigned line, const unsigned (&codes)[4], float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned out[4];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint2 halves = ptx::four_e4m3_to_f16(codes[2 * half + w]);
        out[2 * w] = scale_two(halves.x, factor);
        out[2 * w + 1] = scale_two(halves.y, factor);
      }
      ptx::store_shared_four(line ^ (16 * half), out);
    }
  }
  // scale: of a part; of 584 those of two chunks.
  __device__ __forceinline__ static float factor_of_chunk(unsigned scale, unsigned chunk) {
    return k656 ? __uint_as_float(scale) : tile::e8m0_to_float(scale >> (8 * chunk) & 0xff);
  }

  const PrefillParams& p_;
  const Smem& smem_;
  const unsigned thread_;
  unsigned num_started_ = 0;  // tiles, of all work tiles

 private:
  // What a lane of each `width` has found.
  __device__ __forceinline__ static const char* row_of(const char* found, unsigned lane, int width) {
    return reinterpret_cast<const char*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(found), lane, width));
  }
  // Two fp16 numbers.
  __device__ __forceinline__ static unsigned scale_two(unsigned halves, float factor) {
    return ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(halves)) * factor,
                          ptx::f16_to_float(static_cast<unsigned short>(halves >> 16)) * factor);
  }
  // Asks for the rows of tile i and those before it that are found with it.
  __device__ __forceinline__ void load_index(const CachedSource& rows, int i, int tile_begin) {
    i -= found_tile();
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

  int index_ = -1;        // for the row that is found next
  unsigned position_;     // of the next tile, in those that have been found with it
  RowAddress found_;      // the lane's row of these
  unsigned invalid_ = 0;  // where it is not there, a bit each lane
};

}  // namespace attune::mla
