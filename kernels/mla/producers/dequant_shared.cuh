// SPDX-License-Identifier: Apache-2.0
// The dequant producer of blocks without a cluster. cp.async copies packed rows to shared memory unchanged; the warps
// dequantize them there: fp8 times scales, rounded to bf16 once. Rows outside of a cache are loaded as in
// mla/producers/gather.cuh.
//
// There is no room besides the stages, so fp8 rows are copied into the stage of their tile, into the half of V that is
// empty first: 128 channels of a row in each of its four chunks, where that row will be. The order of dequantization
// overwrites nothing that is still needed.
//
//   chunks            0    1    2    3    4    5    6    7    8
//   copied            c1   c2   c3   c4                       rope (656)
//   c2 is read; c1    V1   V1   c3   c4
//   c3, c4            V1   V1   c3   c4   V3   V3   V4   V4
//   c2                V1   V1   V2   V2   V3   V3   V4   V4
//
// The copies of the next tile are issued as soon as its stage is empty, which is polled in between.
#pragma once

#include "mla/producers/dequant.cuh"

namespace attune::mla {

class SharedDequantProducer : DequantProducer {
 public:
  __device__ __forceinline__ SharedDequantProducer(const WorkTileParams& p, const QueryMaps& q, const Smem& smem)
      : DequantProducer(p, smem),
        q_(q),
        fp8_(ptx::opaque(dequant_row() * 128 + ((lane() % kLanes) ^ raw_swizzle(dequant_row())) * 16)),
        units_(ptx::opaque(units())) {}

  __device__ __forceinline__ void run(const WorkTileReader::Scheduler::Prefetched& first_work) {
    WorkTileReader reader(p_, smem_, q_);
    for (reader.fetch_first(first_work); reader.has_work(); reader.advance()) {
      load(reader);
    }
  }

 private:
  // The swizzle of copied fp8 in units of 16 bytes: eight lanes that read four units of two rows hit all banks.
  __device__ __forceinline__ static constexpr unsigned raw_swizzle(unsigned row) { return row % 2 * 4; }

  __device__ __forceinline__ void load(WorkTileReader& reader) {
    const WorkTile& work = reader.work();
    const int head_tile = reader.head_tile();
    int i = load_uncached(work, head_tile, [&] { reader.load_next_q(), reader.fetch_next(); });
    if (i < work.tile_begin) return;
    bool first = i == work.tile_end - 1;
    const CachedSource rows(p_, work, head_tile);
    locate_first(rows, work, i);
    wait_for_buffer();
    copy(work, i);
    if (first) reader.load_next_q();
#pragma unroll 1
    for (; i >= work.tile_begin; --i) {
      dequant(rows, work, i);
      if (first) reader.fetch_next();
      first = false;
    }
  }

  // Whether those regions of the next stage are empty that are written before dequantization.
  __device__ __forceinline__ bool buffer_is_empty() const {
    const PipelineState pipe = pipeline_state(num_started_);
    bool empty = true;
#pragma unroll
    for (int half = 0; half < 3; ++half) {
      if (written_before_dequant(half))
        empty = empty && ptx::phase_has_ended(smem_.k_empty(pipe.stage, half), pipe.phase ^ 1);
    }
    return !__any_sync(0xffffffffu, !empty);
  }
  __device__ __forceinline__ void wait_for_buffer() const {
#pragma unroll
    for (int half = 0; half < 3; ++half)
      if (written_before_dequant(half)) wait_empty(smem_, pipeline_state(num_started_), half);
  }
  // The mask, the fp8 channels and the rope channels.
  __device__ __forceinline__ static constexpr bool written_before_dequant(int half) {
    return half == kKOnly || half == 1 || half == half_of(kRopeSlice);
  }

  // Issues the copies of tile i's packed rows, which have been located.
  __device__ __forceinline__ void copy(const WorkTile& work, int i) {
    const int stage = pipeline_state(num_started_++).stage;
    // A lane copies 16 bytes of each 128, of every fourth row.
    const unsigned mine = lane(), unit = mine % 8, row = mine / 8, line = smem_.k(stage) + (first_row() + row) * 128;
    const unsigned fp8 = line + (unit ^ raw_swizzle(row)) * 16;
    const unsigned rope = line + kRopeChunk * Config::kChunkBytes + (unit ^ row) * 16;
#pragma unroll
    for (int j = 0; j < kRowsOfWarp / 4; ++j) {
      const char* const from = located_row(4 * j + row) + 16 * unit;
#pragma unroll
      for (int slice = 1; slice < kSlices; ++slice) {
        if (unit < 4 * chunks_of(slice))
          ptx::copy_async<16>(fp8 + j * (4 * 128) + (slice - 1) * Config::kChunkBytes, from + 128 * (slice - 1), 16);
      }
      ptx::copy_async<16>((rope ^ (j % 2 * 64)) + j * (4 * 128), from + Packed::kRope, 16);
    }
    ptx::commit_copies();
    scales_ = load_scales(own_row());
    store_row_mask(stage, invalid_rows(), 0);
    store_needs_row_mask(work, i, stage);
  }

  // Dequantizes tile i, whose copies have been issued.
  __device__ __forceinline__ void dequant(const CachedSource& rows, const WorkTile& work, int i) {
    const PipelineState pipe = pipeline_state(num_started_ - 1);
    bool copies = i > work.tile_begin;  // the next tile's copies are still to be issued
    advance(rows, i - 1, work.tile_begin);
    ptx::wait_copies<0>();
    __syncwarp();
    Fp8 first, second, third;
    read(pipe.stage, 1, first);
    read(pipe.stage, 2, second);
    __syncwarp();
    write(pipe.stage, 1, first, scale_of(1));
    publish(pipe.stage, kFirstSlice, 1);
    read(pipe.stage, 3, third);
    wait_empty(smem_, pipe, 2);
    write(pipe.stage, 3, third, scale_of(3));
    publish(pipe.stage, 3, 3);
    read(pipe.stage, 4, first);
    write(pipe.stage, 4, first, scale_of(4));
    publish(pipe.stage, 4, 4);
    const unsigned scale = scale_of(2);  // before the next tile's scales arrive
    if (copies && buffer_is_empty()) {
      copy(work, i - 1);
      copies = false;
    }
    write(pipe.stage, 2, second, scale);
    publish(pipe.stage, 2, 2);
    if (copies) {
      wait_for_buffer();
      copy(work, i - 1);
    }
  }

  __device__ __forceinline__ unsigned scale_of(int slice) const {
    return __shfl_sync(0xffffffffu, scales_, slice - 1, kLanes);
  }
  struct Fp8 {
    unsigned words[2][4];  // 16 fp8 channels of each chunk
  };
  __device__ __forceinline__ void read(int stage, int slice, Fp8& fp8) const {
    const unsigned line = smem_.k(stage) + fp8_;
#pragma unroll
    for (unsigned j = 0; j < chunks_of(slice); ++j)
      ptx::load_shared_four((line ^ (64 * j)) + (slice - 1) * Config::kChunkBytes, fp8.words[j]);
  }
  __device__ __forceinline__ void write(int stage, int slice, const Fp8& fp8, unsigned scale) const {
    const unsigned line = smem_.k(stage) + units_;
#pragma unroll
    for (unsigned j = 0; j < chunks_of(slice); ++j)
      write_chunk(line + (slice_at(slice).chunk + j) * Config::kChunkBytes, fp8.words[j], factor_of_chunk(scale, j));
  }

  // Publishes slices that the warp has dequantized or copied.
  __device__ __forceinline__ void publish(int stage, int first, int last) const {
    __syncwarp();
    if (!ptx::elect()) return;
#pragma unroll
    for (int slice = first; slice <= last; ++slice) ptx::arrive(smem_.k_full(stage, slice));
  }

  const QueryMaps q_;
  const unsigned fp8_;  // where the lane reads the fp8 channels of its row, in a chunk
  const unsigned units_;  // where it writes bf16
  unsigned scales_;       // of the tile that is dequantized next
};

}  // namespace attune::mla
