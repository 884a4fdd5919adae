// SPDX-License-Identifier: Apache-2.0
// Threads that bring keys row by row, from where a list or a table says: rows of 16-bit elements, by asynchronous
// copies. They lie swizzled, as the TMA would have written them. Rows that are not there, or that nobody may see,
// become zero.
//
// A warp has sixteen rows of every tile. Its lanes find out where those of two tiles lie, a lane a row, while no buffer
// is empty, so that nothing is between that and the copies. Eight neighbouring lanes have the bytes of a row's chunk
// side by side.
#pragma once

#include "mla/producers/kv_source.cuh"
#include "mla/producers/work_tile_reader.cuh"

namespace attune::mla {

// Tile i of a work tile: computed anew wherever it is needed, as what is needed of it is little and registers are few.
__device__ __forceinline__ Tile tile_of(const WorkTile& work, int i) {
  return tile_at(work, Line(work.num_cached, work.first_key, work.end_key), i);
}

// What lies beside tile i and is the same for all of its rows. After the stage is empty, before it is handed over.
__device__ __forceinline__ void note_tile(const PrefillParams& p, const Smem& smem, int stage, const WorkTile& work,
                                          int i) {
  if (Config::kSparse || threadIdx.x != 0) return;
  const Tile tile = tile_of(work, i);
  const unsigned at = smem.note(stage) + 4 * Config::kHiddenWords;
  ptx::store_shared_u32(at, static_cast<unsigned>(tile.start));
  ptx::store_shared_u32(at + 4, is_edge(p, work, tile) ? 1 : 0);
}

__device__ __forceinline__ void wait_empty(const Smem& smem, const PipelineState& pipe, int half) {
  ptx::wait_phase(smem.k_empty(pipe.stage, half), pipe.phase ^ 1);
}

// What is in K only, or a half of V; and the part at whose barrier it is handed over.
__device__ __forceinline__ constexpr Part channels_of(int half) {
  return half == kKeysOnly ? part_at(0) : Part{4 * (half - 1), 4};
}
__device__ __forceinline__ constexpr int part_of(int half) { return 2 * half; }

// A warp's rows of a tile.
class RowCopies {
 public:
  static constexpr int kLanes = 8, kRowsAtATime = 32 / kLanes, kRows = Config::kKeys / (Config::kLoaders / 32),
                       kRowsOfLane = kRows / kRowsAtATime;
  static constexpr int kFound = Config::kGathers ? 32 / kRows : 1;  // tiles whose rows are found together

  __device__ __forceinline__ RowCopies(const PrefillParams& p, const Smem& smem) : p_(p), smem_(smem) {}

  // What the lists or the tables say of the lane's row, of tile i or of one of those before it.
  __device__ __forceinline__ int ask(const WorkTile& work, int head_tile, int i) const {
    i -= found_tile();
    if (kFound > 1 && i < work.tile_begin) return -1;
    const Tile tile = tile_of(work, i);
    return Source(p_, work, kv_head(head_tile), tile).ask(tile.start + own());
  }
  // Where these rows are. answer: what ask() said.
  __device__ __forceinline__ void find(const WorkTile& work, int head_tile, int i, int answer) {
    const Tile tile = tile_of(work, i - found_tile());
    const char* const row = Source(p_, work, kv_head(head_tile), tile).find(tile.start + own(), answer);
    absent_ = __ballot_sync(0xffffffffu, row == nullptr);
    found_ = row != nullptr ? row : p_.q;  // not read
    position_ = 0;
  }
  // The rows of the next of these tiles, of which the lane copies pieces. What is not there is not read: it begins
  // where q does, whose rows are as long.
  struct Pieces {
    const char* from[kRowsOfLane];
    unsigned valid[kRowsOfLane], absent;  // absent: a bit for each row
  };
  __device__ __forceinline__ Pieces next() {
    Pieces pieces;
    const unsigned first = kFound > 1 ? position_++ * kRows : 0;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const unsigned who = first + kRowsAtATime * i + lane() / kLanes;
      pieces.from[i] = reinterpret_cast<const char*>(__shfl_sync(
                           0xffffffffu, reinterpret_cast<unsigned long long>(found_), static_cast<int>(who))) +
                       16 * (lane() % kLanes);
      pieces.valid[i] = (absent_ >> who & 1) != 0 ? 0 : 16;
    }
    pieces.absent = absent_ >> first;
    return pieces;
  }
  // Tells the math groups which rows are not there. After the stage is empty, before it is handed over.
  __device__ __forceinline__ void note(int stage, const WorkTile& work, int i, const Pieces& pieces) const {
    if (lane() < kRows / 8) {
      const int word = first() / 8 + lane();
      ptx::store_shared_u32(smem_.note(stage) + 4 * word, (pieces.absent >> (8 * lane()) & 0xff) << (word % 4 * 8));
    }
    note_tile(p_, smem_, stage, work, i);
    __syncwarp();
  }
  __device__ __forceinline__ void copy(int stage, Part channels, const Pieces& pieces) const {
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = row_of_lane(i);
      const unsigned to = smem_.k(stage) + channels.chunk * Config::kChunkBytes + row * 128 +
                          (lane() % kLanes ^ (row & 7)) * 16;
      const char* const from = pieces.from[i] + static_cast<unsigned>(128 * channels.chunk);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (j < channels.count) ptx::copy_async<16>(to + j * Config::kChunkBytes, from + 128 * j, pieces.valid[i]);
    }
  }
  // All of the next tile, when its buffer is empty.
  __device__ __forceinline__ void copy_tile(const PipelineState& pipe, const WorkTile& work, int i) {
    const Pieces pieces = next();
    wait_empty(smem_, pipe, kKeysOnly);
    note(pipe.stage, work, i, pieces);
    copy(pipe.stage, channels_of(kKeysOnly), pieces);
#pragma unroll
    for (int half = 1; half <= 2; ++half) {
      wait_empty(smem_, pipe, half);
      copy(pipe.stage, channels_of(half), pieces);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int first() { return static_cast<int>(threadIdx.x) / 32 * kRows; }
  __device__ __forceinline__ static int own() { return first() + lane() % kRows; }
  __device__ __forceinline__ static int found_tile() { return kFound > 1 ? lane() / kRows : 0; }
  __device__ __forceinline__ static int row_of_lane(int i) { return first() + kRowsAtATime * i + lane() / kLanes; }
  __device__ __forceinline__ int kv_head(int head_tile) const { return head_tile * p_.heads_of_tile / p_.group; }

  const PrefillParams& p_;
  const Smem& smem_;
  const char* found_ = nullptr;  // the lane's row
  unsigned absent_ = 0;          // of these rows, a bit each
  unsigned position_ = 0;        // of the next tile, in those whose rows have been found together
};

class RowLoader {
 public:
  __device__ __forceinline__ RowLoader(const PrefillParams& p, const ptx::TensorMap& q, const Smem& smem)
      : p_(p), q_(q), smem_(smem), copies_(p, smem) {}

  __device__ __forceinline__ void run(const WorkTileReader::Scheduler::First& asked) {
    WorkTileReader walk(p_, smem_, q_);
    for (walk.take_first(asked); walk.has_work(); walk.go_on()) {
      load(walk);
    }
  }

 private:
  static_assert(RowCopies::kFound == 2 || !Config::kGathers, "rows are found for two tiles at a time");

  // Rows are found for a pair of tiles of the math groups when the pair before is under way, as there is nothing to do
  // then until the first's buffer is empty again; what the list says of the pair after them is asked for then too, and
  // the next work tile is taken, a pair before the last. The second's buffer is empty soon after the first's.
  __device__ __forceinline__ void load(WorkTileReader& walk) {
    const WorkTile& work = walk.work();
    const int head_tile = walk.head_tile();
    int i = work.tile_end - 1;
    copies_.find(work, head_tile, i, copies_.ask(work, head_tile, i));
    int answer = copies_.ask(work, head_tile, i - 2);
    const int tiles = i + 1 - work.tile_begin, take_at = tiles < 2 ? 0 : max(tiles - 2 - (tiles & 1 ^ 1), 1);
    int tile = 0;
#pragma unroll 1
    for (; i >= work.tile_begin; --i, ++tile) {
      // The same for all lanes, as the compiler learns from a shuffle: barriers' addresses are.
      const unsigned same = __shfl_sync(0xffffffffu, tiles_++ << 1 | (tile & 1), 0);
      const PipelineState pipe = turn_of(same >> 1);
      const RowCopies::Pieces pieces = copies_.next();
      wait_empty(smem_, pipe, kKeysOnly);
      copies_.note(pipe.stage, work, i, pieces);
      copy(pipe.stage, kKeysOnly, pieces);
      if ((same & 1) == 0) {
        copy_halves<1>(pipe, pieces);
      } else {
        copy_halves<2>(pipe, pieces);
        if (i > work.tile_begin) {
          copies_.find(work, head_tile, i - 1, answer);
          answer = copies_.ask(work, head_tile, i - 3);
        }
      }
      if (tile == 0) walk.copy_queries();
      if (tile == take_at) walk.take();
    }
  }
  template <int kFirst>
  __device__ __forceinline__ void copy_halves(const PipelineState& pipe, const RowCopies::Pieces& pieces) const {
#pragma unroll
    for (int half = kFirst; half >= 1 && half <= 2; half += 3 - 2 * kFirst) {
      wait_empty(smem_, pipe, half);
      copy(pipe.stage, half, pieces);
    }
  }
  __device__ __forceinline__ void copy(int stage, int half, const RowCopies::Pieces& pieces) const {
    if (channels_of(half).count == 0) return;
    copies_.copy(stage, channels_of(half), pieces);
    // The copies count when they are there; what the warp has stored, now.
    const unsigned full = smem_.k_full(stage, part_of(half));
    ptx::arrive_after_copies(full);
    if (part_of(half) == kNotedPart && threadIdx.x % 32 == 0) ptx::arrive(full);
  }

  const PrefillParams& p_;
  const ptx::TensorMap& q_;
  const Smem& smem_;
  RowCopies copies_;
  unsigned tiles_ = 0;  // of all work tiles
};

}  // namespace attune::mla
