// SPDX-License-Identifier: Apache-2.0
// Threads that bring rows of the packed formats in pairs of blocks: codes are multiplied by their scales and rounded to
// bf16 once. What a lane decodes of the next tile it has in registers while that tile's buffer is not empty yet, so
// that between the two lies no copy. Each block has half of the rows, and the copy engine brings them to the other,
// half of V at a time. Rows that are not in a cache come as in mla/producers/gather.cuh.
//
// What takes time are these warps' own instructions, one after the other: hence few fences, and no question for the
// thread's number.
#pragma once

#include "mla/producers/dequant.cuh"

namespace attune::mla {

class HeldLoader : PackedTiles {
 public:
  __device__ __forceinline__ HeldLoader(const PrefillParams& p, const ptx::TensorMap& q, const Smem& smem)
      : PackedTiles(p, smem), q_(q), to_other_(smem.to_other()) {}

  __device__ __forceinline__ void run(const WorkTileReader::Scheduler::First& asked) {
    WorkTileReader walk(p_, smem_, q_);
    for (walk.take_first(asked); walk.has_work(); walk.go_on()) {
      load(walk);
    }
  }

 private:
  __device__ __forceinline__ void load(WorkTileReader& walk) {
    const WorkTile& work = walk.work();
    const int head_tile = walk.head_tile();
    int i = load_uncached(work, head_tile, [&] { walk.copy_queries(), walk.take(); });
    if (i < work.tile_begin) return;
    const CodeRows rows(p_, work, head_tile);
    find_first(rows, work, i);
#pragma unroll 1
    for (; i >= work.tile_begin; --i) {
      hold(second_of(work, i));
      if (i == work.tile_end - 1) walk.copy_queries();
      decode(rows, work, i);
      if (i == work.tile_end - 1) walk.take();
    }
  }

  // 1: tile i is one of math group 1.
  __device__ __forceinline__ static unsigned second_of(const WorkTile& work, int i) {
    return work.tile_end - 1 - i & 1;
  }
  // Of parts 1 to 4, counted from 0: the one that is decoded as the i-th (part_in_turn()).
  __device__ __forceinline__ static unsigned part_held(unsigned i, unsigned second) { return i ^ 2 * second; }

  // Asks for what the lane decodes of the next tile, of each chunk 16 codes.
  __device__ __forceinline__ void hold(unsigned second) {
    const char* const row = own_row();
    scales_ = ask_scales(row);
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::load_early_four(row + Packed::kRope + lane() % kLanes * 32 + 16 * j, rope_[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* const from = row + lane() % kLanes * 16 + 128 * part_held(i, second);
#pragma unroll
      for (int j = 0; j < 2; ++j) ptx::load_early_four(from + 64 * j, held_[i][j]);
    }
  }
  // Tile i, which the lane has.
  __device__ __forceinline__ void decode(const CodeRows& rows, const WorkTile& work, int i) {
    const PipelineState pipe = turn_of(begun_++);
    const unsigned second = second_of(work, i), not_there = absent();
    go_on(rows, i - 1, work.tile_begin);
    wait_empty(smem_, pipe, kKeysOnly);
    wait_empty(smem_, pipe, 1 + static_cast<int>(second));
    note(pipe.stage, not_there, to_other_);
    note_edge(work, i, pipe.stage);
    const unsigned line = smem_.k(pipe.stage) + units();
    if (k656) write_rope(line);
#pragma unroll
    for (int in_turn = 0; in_turn < 4; ++in_turn) {
      const unsigned part = part_held(in_turn, second);
      if (in_turn == 2) wait_empty(smem_, pipe, 2 - static_cast<int>(second));
      const unsigned scale = __shfl_sync(0xffffffffu, scales_, static_cast<int>(part), kLanes);
#pragma unroll
      for (unsigned j = 0; j < 2; ++j) {
        if (!k656 && j == 1 && part == 3) {
          write_rope(line);
        } else {
          write_chunk(line + (2 * part + j) * Config::kChunkBytes, held_[in_turn][j], factor_of_chunk(scale, j));
        }
      }
      if (in_turn % 2 == 1) hand_over(pipe.stage, part / 2, in_turn == 1);
    }
  }
  __device__ __forceinline__ void write_rope(unsigned line) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::store_shared_four((line ^ (16 * j)) + kRopeChunk * Config::kChunkBytes, rope_[j]);
  }

  // A half of V, 0 or 1. first: with what is in K only.
  __device__ __forceinline__ void hand_over(int stage, unsigned half, bool first) const {
    constexpr unsigned kNotes = 4 * (kRowsOfBlock / 8);
    ptx::fence_async_proxy();
    __syncwarp();
    if (!ptx::elect()) return;
    if (k656 && first) hand_over_chunks<1>(stage, kKeysOnly, kRopeChunk, kNotes);
    hand_over_chunks<4>(stage, 2 + 2 * static_cast<int>(half), 4 * half, !k656 && half == 0 ? kNotes : 0);
  }
  // The warp's rows of a chunk lie side by side. notes: bytes that come beside them.
  template <unsigned kCount>
  __device__ __forceinline__ void hand_over_chunks(int stage, int barrier, unsigned chunk, unsigned notes) const {
    const unsigned full = smem_.k_full(stage, barrier), own = smem_.k(stage) + first_row() * 128;
#pragma unroll
    for (unsigned j = 0; j < kCount; ++j) {
      const unsigned from = own + (chunk + j) * Config::kChunkBytes;
      ptx::copy_to_block(from + to_other_, from, kRowsOfWarp * 128, full + to_other_);
    }
    if (thread_ < 32) {
      ptx::arrive_expecting(full, kRowsOfBlock * 128 * kCount + notes);
    } else {
      ptx::arrive(full);
    }
  }

  const ptx::TensorMap& q_;
  const unsigned to_other_;
  unsigned scales_;       // of the tile that is decoded next
  unsigned held_[4][2][4], rope_[2][4];
};

}  // namespace attune::mla
