// SPDX-License-Identifier: Apache-2.0
// The dequant producer of clusters: fp8 times scales, rounded to bf16 once. Lanes load the next tile's fp8 codes into
// registers before its stage is empty, so that dequantization starts as soon as it is. Each block dequantizes half of
// the rows, and the copy engine sends them to the other block (DSMEM), one half of V at a time. Rows outside of a cache
// are loaded as in mla/producers/gather.cuh.
//
// The instructions of these warps limit the kernel, hence the few fences and no repeated reads of threadIdx.
#pragma once

#include "mla/producers/dequant.cuh"

namespace attune::mla {

class RegisterDequantProducer : DequantProducer {
 public:
  __device__ __forceinline__ RegisterDequantProducer(const WorkTileParams& p, const QueryMaps& q, const Smem& smem)
      : DequantProducer(p, smem), q_(q), to_other_(smem.to_other()) {}

  __device__ __forceinline__ void run(const WorkTileReader::Scheduler::Prefetched& first_work) {
    WorkTileReader reader(p_, smem_, q_);
    for (reader.fetch_first(first_work); reader.has_work(); reader.advance()) {
      load(reader);
    }
  }

 private:
  __device__ __forceinline__ void load(WorkTileReader& reader) {
    const WorkTile& work = reader.work();
    const int head_tile = reader.head_tile();
    int i = load_uncached(work, head_tile, [&] { reader.load_next_q(), reader.fetch_next(); });
    if (i < work.tile_begin) return;
    const CachedSource rows(p_, work, head_tile);
    locate_first(rows, work, i);
#pragma unroll 1
    for (; i >= work.tile_begin; --i) {
      load_next(second_of(work, i));
      if (i == work.tile_end - 1) reader.load_next_q();
      dequant(rows, work, i);
      if (i == work.tile_end - 1) reader.fetch_next();
    }
  }

  // Returns 1 if tile i is one of warpgroup 1.
  __device__ __forceinline__ static unsigned second_of(const WorkTile& work, int i) {
    return work.tile_end - 1 - i & 1;
  }
  // The slice that is dequantized as the i-th; slices 1 to 4 are counted from 0 here (slice_in_order()).
  __device__ __forceinline__ static unsigned slice_in_turn(unsigned i, unsigned second) { return i ^ 2 * second; }

  // Loads what the lane dequantizes of the next tile: 16 fp8 channels of each chunk.
  __device__ __forceinline__ void load_next(unsigned second) {
    const char* const row = own_row();
    scales_ = load_scales(row);
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::load_early_four(row + Packed::kRope + lane() % kLanes * 32 + 16 * j, rope_[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* const from = row + lane() % kLanes * 16 + 128 * slice_in_turn(i, second);
#pragma unroll
      for (int j = 0; j < 2; ++j) ptx::load_early_four(from + 64 * j, staged_[i][j]);
    }
  }
  // Dequantizes tile i, whose fp8 are in registers.
  __device__ __forceinline__ void dequant(const CachedSource& rows, const WorkTile& work, int i) {
    const PipelineState pipe = pipeline_state(num_started_++);
    const unsigned second = second_of(work, i), invalid = invalid_rows();
    advance(rows, i - 1, work.tile_begin);
    wait_empty(smem_, pipe, kKOnly);
    wait_empty(smem_, pipe, 1 + static_cast<int>(second));
    store_row_mask(pipe.stage, invalid, to_other_);
    store_needs_row_mask(work, i, pipe.stage);
    const unsigned line = smem_.k(pipe.stage) + units();
    if (k656) write_rope(line);
#pragma unroll
    for (int in_turn = 0; in_turn < 4; ++in_turn) {
      const unsigned slice = slice_in_turn(in_turn, second);
      if (in_turn == 2) wait_empty(smem_, pipe, 2 - static_cast<int>(second));
      const unsigned scale = __shfl_sync(0xffffffffu, scales_, static_cast<int>(slice), kLanes);
#pragma unroll
      for (unsigned j = 0; j < 2; ++j) {
        if (!k656 && j == 1 && slice == 3) {
          write_rope(line);
        } else {
          write_chunk(line + (2 * slice + j) * Config::kChunkBytes, staged_[in_turn][j], factor_of_chunk(scale, j));
        }
      }
      if (in_turn % 2 == 1) publish(pipe.stage, slice / 2, in_turn == 1);
    }
  }
  __device__ __forceinline__ void write_rope(unsigned line) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::store_shared_four((line ^ (16 * j)) + kRopeChunk * Config::kChunkBytes, rope_[j]);
  }

  // Publishes half 0 or 1 of V. first: together with the channels that only K has.
  __device__ __forceinline__ void publish(int stage, unsigned half, bool first) const {
    constexpr unsigned kMaskBytes = 4 * (kRowsOfBlock / 8);
    ptx::fence_async_proxy();
    __syncwarp();
    if (!ptx::elect()) return;
    if (k656 && first) publish_chunks<1>(stage, kKOnly, kRopeChunk, kMaskBytes);
    publish_chunks<4>(stage, 2 + 2 * static_cast<int>(half), 4 * half, !k656 && half == 0 ? kMaskBytes : 0);
  }
  // Sends the warp's rows of chunks, which are contiguous. mask_bytes: what the mask for the other block adds at the
  // barrier.
  template <unsigned kCount>
  __device__ __forceinline__ void publish_chunks(int stage, int barrier, unsigned chunk, unsigned mask_bytes) const {
    const unsigned full = smem_.k_full(stage, barrier), own = smem_.k(stage) + first_row() * 128;
#pragma unroll
    for (unsigned j = 0; j < kCount; ++j) {
      const unsigned from = own + (chunk + j) * Config::kChunkBytes;
      ptx::copy_to_block(from + to_other_, from, kRowsOfWarp * 128, full + to_other_);
    }
    if (thread_ < 32) {
      ptx::arrive_expecting(full, kRowsOfBlock * 128 * kCount + mask_bytes);
    } else {
      ptx::arrive(full);
    }
  }

  const QueryMaps q_;
  const unsigned to_other_;
  unsigned scales_;  // of the tile that is dequantized next
  unsigned staged_[4][2][4], rope_[2][4];
};

}  // namespace attune::mla
