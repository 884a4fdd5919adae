// SPDX-License-Identifier: Apache-2.0
// Threads that bring keys row by row, from where a list or a table says: rows of 16-bit elements, by asynchronous
// copies. They lie swizzled, as the TMA would have written them. Rows that are not there, or that nobody may see,
// become zero.
//
// Of four warps two have each of the two buffers, half of its rows each: none waits for another's to be empty, or for
// what it has copied. Their lanes find out where rows lie, a lane a row, while they wait anyway; eight neighbouring lanes
// have the bytes of a row's chunk side by side.
#pragma once

#include "mla/source.cuh"
#include "mla/tasks.cuh"

namespace attune::mla {

// Tile i of a task: computed anew wherever it is needed, as what is needed of it is little and registers are few.
__device__ __forceinline__ Tile tile_of(const Task& task, int i) {
  return tile_at(task, Line(task.num_cached, task.first_key, task.end_key), i);
}

// What lies beside tile i and is the same for all of its rows. After the stage is empty, before it is handed over.
__device__ __forceinline__ void note_tile(const PrefillParams& p, const Places& places, int stage, const Task& task,
                                          int i) {
  if (Config::kSparse || threadIdx.x % (Config::kSharesRows ? Config::kLoaders / 2 : Config::kLoaders) != 0) return;
  const Tile tile = tile_of(task, i);
  const unsigned at = places.note(stage) + 4 * Config::kHiddenWords;
  ptx::store_shared_u32(at, static_cast<unsigned>(tile.start));
  ptx::store_shared_u32(at + 4, is_edge(p, task, tile) ? 1 : 0);
}

__device__ __forceinline__ void wait_empty(const Places& places, const Turn& turn, int half) {
  ptx::wait_phase(places.k_empty(turn.stage, half), turn.parity ^ 1);
}

// A warp's rows of a tile.
class RowCopies {
 public:
  // In pairs of blocks half of the warps have every other tile.
  static constexpr int kStep = Config::kSharesRows ? 2 : 1;
  static constexpr int kLanes = 8, kRowsAtATime = 32 / kLanes, kWarps = Config::kLoaders / 32 / kStep,
                       kRows = Config::kRowsBrought / kWarps, kRowsOfLane = kRows / kRowsAtATime;
  static constexpr int kFound = 32 / kRows;  // tiles of the warp whose rows are found together

  __device__ __forceinline__ RowCopies(const PrefillParams& p, const Places& places) : p_(p), places_(places) {}

  // What the lists or the tables say of the lane's row of tile i or of one of those found with it.
  __device__ __forceinline__ int ask(const Task& task, int head_tile, int i) const {
    i -= kStep * found_tile();
    if (i < task.tile_begin) return -1;
    const Tile tile = tile_of(task, i);
    return Source(p_, task, kv_head(head_tile), tile).ask(tile.start + own());
  }
  // Where the rows are. answer: what ask() said.
  __device__ __forceinline__ void find(const Task& task, int head_tile, int i, int answer) {
    const Tile tile = tile_of(task, i - kStep * found_tile());
    const char* const row = Source(p_, task, kv_head(head_tile), tile).find(tile.start + own(), answer);
    absent_ = __ballot_sync(0xffffffffu, row == nullptr);
    found_ = row != nullptr ? row : p_.q;  // not read
    position_ = 0;
  }
  // The first of the tiles that have been found needs no copies.
  __device__ __forceinline__ void pass() { ++position_; }
  __device__ __forceinline__ bool has_more() const { return position_ < kFound; }

  // The rows of the next of these tiles, of which the lane copies pieces. What is not there is not read: it begins where
  // q does, whose rows are as long.
  struct Pieces {
    const char* from[kRowsOfLane];
    unsigned absent;  // a bit for each row
  };
  __device__ __forceinline__ Pieces next() {
    Pieces pieces;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const unsigned who = position_ * kRows + kRowsAtATime * i + lane() / kLanes;
      pieces.from[i] = reinterpret_cast<const char*>(__shfl_sync(
                           0xffffffffu, reinterpret_cast<unsigned long long>(found_), static_cast<int>(who))) +
                       16 * (lane() % kLanes);
    }
    pieces.absent = absent_ >> position_ * kRows;
    ++position_;
    return pieces;
  }
  // Tells the math groups which rows are not there. Before the tile is handed over.
  __device__ __forceinline__ void note(int stage, const Task& task, int i, const Pieces& pieces) const {
    if (lane() < kRows / 8) {
      const int word = first() / 8 + lane();
      const unsigned at = places_.note(stage) + 4 * word, x = (pieces.absent >> (8 * lane()) & 0xff) << (word % 4 * 8);
      ptx::store_shared_u32(at, x);
      if constexpr (Config::kSharesRows) {
        const unsigned there = places_.to_other();
        ptx::store_async(at + there, x, places_.k_full(stage, kNotedPart) + there);
      }
    }
    note_tile(p_, places_, stage, task, i);
  }
  __device__ __forceinline__ void copy(int stage, Part channels, const Pieces& pieces) const {
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const int row = row_of_lane(i);
      const unsigned to = places_.k(stage) + channels.chunk * Config::kChunkBytes + row * 128 +
                          (lane() % kLanes ^ (row & 7)) * 16;
      const char* const from = pieces.from[i] + static_cast<unsigned>(128 * channels.chunk);
      const unsigned valid = (pieces.absent >> (kRowsAtATime * i + lane() / kLanes) & 1) != 0 ? 0 : 16;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < channels.count) ptx::copy_async<16>(to + j * Config::kChunkBytes, from + 128 * j, valid);
      }
    }
  }
  // Has the rows of the next tile copied when its buffer is empty. hand_over(part) when the copies of a part are under way.
  template <class HandOver>
  __device__ __forceinline__ void copy_tile(const Turn& turn, const Task& task, int i, HandOver&& hand_over) {
    const Pieces pieces = next();
    wait_empty(places_, turn, kKeysOnly);
    note(turn.stage, task, i, pieces);
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part == 1 || part == 3) wait_empty(places_, turn, half_of(part));
      copy(turn.stage, part_at(part), pieces);
      hand_over(part);
    }
  }
  // The first of the warp's rows.
  __device__ __forceinline__ static int first() {
    return (Config::kSharesRows ? ptx::cluster_rank() * Config::kRowsBrought : 0) +
           static_cast<int>(threadIdx.x) / 32 % kWarps * kRows;
  }

 private:
  // Computed anew wherever it is asked for, with what follows from it, as registers are scarce.
  __device__ __forceinline__ static int lane() {
    return static_cast<int>((Config::kSharesRows ? ptx::kept(threadIdx.x) : threadIdx.x) % 32);
  }
  __device__ __forceinline__ static int own() { return first() + lane() % kRows; }
  __device__ __forceinline__ static int found_tile() { return lane() / kRows; }
  __device__ __forceinline__ int kv_head(int head_tile) const { return head_tile * p_.heads_of_tile / p_.group; }

  __device__ __forceinline__ static int row_of_lane(int i) { return first() + kRowsAtATime * i + lane() / kLanes; }

  const PrefillParams& p_;
  const Places& places_;
  const char* found_ = nullptr;  // the lane's row
  unsigned absent_ = 0;          // of these rows, a bit each
  unsigned position_ = 0;        // of the next tile, in those that have been found together
};

class RowLoader {
 public:
  __device__ __forceinline__ RowLoader(const PrefillParams& p, const ptx::TensorMap& q, const Places& places)
      : p_(p), q_(q), places_(places), copies_(p, places) {}

  __device__ __forceinline__ void run() {
    TaskWalk walk(p_, places_, q_);
    for (walk.take(); walk.has_task(); walk.go_on()) {
      load(walk);
    }
  }

 private:
  // Math warps do not fence what threads have copied in a cluster: those do, when it is there, and have it sent to the
  // other block.
  static constexpr bool kDelivers = !Config::kReadersFence;

  static constexpr int kStep = RowCopies::kStep;

  // Where warps have all tiles, rows are found for the second of a pair of the math groups and for the next first, when
  // the first has been copied: the second's buffer is not yet empty then. What the list says of the next ones is asked
  // for when both are under way, as there is nothing to do for a while.
  __device__ __forceinline__ void load(TaskWalk& walk) {
    const Task& task = walk.task();
    const int head_tile = walk.head_tile();
    // The warp's first tile, from the task's last one.
    const unsigned skipped = kStep > 1 ? (tiles_ ^ threadIdx.x / (32 * RowCopies::kWarps)) & 1 : 0;
    int i = task.tile_end - 1 - static_cast<int>(skipped), answer = -1;
    unsigned tile = skipped;
    if (i >= task.tile_begin) {
      constexpr int kBefore = kStep > 1 ? 0 : 1;
      copies_.find(task, head_tile, i + kBefore, copies_.ask(task, head_tile, i + kBefore));
      if (kBefore > 0) copies_.pass();
      answer = copies_.ask(task, head_tile, i + kBefore - kAhead);
    }
    bool first = true;
    do {  // once, even where the warp has no tile
      if (i >= task.tile_begin) {
        // The same for all lanes, as the compiler learns from a shuffle: barriers' addresses are.
        const unsigned same = __shfl_sync(0xffffffffu, tiles_ + tile << 1 | (tile & 1), 0);
        const bool second = (same & 1) != 0;
        copy_tile(turn_of(same >> 1), second, task, i);
        const bool finds = !copies_.has_more() && i - kStep >= task.tile_begin;
        if (finds) copies_.find(task, head_tile, i - kStep, answer);
        if (kStep > 1 ? finds : second) answer = copies_.ask(task, head_tile, i - kAhead - (kStep > 1 ? kStep : 0));
      }
      if (first) walk.copy_queries();
      if (is_time_to_take(tile, skipped, task.tile_end - task.tile_begin)) walk.take();
      first = false;
      i -= kStep, tile += kStep;
    } while (i >= task.tile_begin);
    tiles_ += task.tile_end - task.tile_begin;
  }
  static constexpr int kAhead = kStep * RowCopies::kFound;
  // The next task is taken after the warp's last tile but one; or, where it has all, after the last second one of a pair
  // that is not the last.
  __device__ __forceinline__ static bool is_time_to_take(unsigned tile, unsigned skipped, int tiles) {
    const int last = kStep > 1 ? skipped + 2 * max((tiles - static_cast<int>(skipped) + 1) / 2 - 2, 0)
                               : tiles < 2 ? 0 : max(tiles - 2 - (tiles & 1 ^ 1), 1);
    return static_cast<int>(tile) == last;
  }

  __device__ __forceinline__ void copy_tile(const Turn& turn, bool second, const Task& task, int i) {
    const RowCopies::Pieces pieces = copies_.next();
    wait_empty(places_, turn, kKeysOnly);
    copies_.note(turn.stage, task, i, pieces);
    __syncwarp();
    copy(turn.stage, kKeysOnly, pieces);
    // The first tile's halves become empty long after one another, the second's do not.
    const int half = second ? 2 : 1;
    wait_empty(places_, turn, half);
    copy(turn.stage, half, pieces);
    if (!second) deliver<0>(turn.stage, half, true);
    wait_empty(places_, turn, 3 - half);
    copy(turn.stage, 3 - half, pieces);
    if (second) deliver<1>(turn.stage, half, true);
    deliver<0>(turn.stage, 3 - half, false);
  }

  // What is in K only, or a half of V.
  __device__ __forceinline__ static constexpr Part channels_of(int half) {
    return half == kKeysOnly ? part_at(0) : Part{4 * (half - 1), 4};
  }
  // The part at whose barrier it is handed over.
  __device__ __forceinline__ static constexpr int part_of(int half) { return 2 * half; }

  __device__ __forceinline__ void copy(int stage, int half, const RowCopies::Pieces& pieces) const {
    copies_.copy(stage, channels_of(half), pieces);
    if (kDelivers) return ptx::commit_copies();
    if (channels_of(half).count == 0) return;
    // The copies count when they are there; what the warp has stored, now.
    const unsigned full = places_.k_full(stage, part_of(half));
    ptx::arrive_after_copies(full);
    if (part_of(half) == kNotedPart && threadIdx.x % 32 == 0) ptx::arrive(full);
  }
  // A half of V, or with what is in K only. kYounger: what has been copied since, and may still be under way.
  template <int kYounger>
  __device__ __forceinline__ void deliver(int stage, int half, bool with_keys_only) const {
    if (!kDelivers) return;
    ptx::wait_copies<kYounger>();
    ptx::fence_async_proxy();
    __syncwarp();
    if (!ptx::elect()) return;
    if (with_keys_only && channels_of(kKeysOnly).count != 0) send(stage, kKeysOnly);
    send(stage, half);
  }
  __device__ __forceinline__ void send(int stage, int half) const {
    const unsigned full = places_.k_full(stage, part_of(half));
    if constexpr (Config::kSharesRows) {
      constexpr unsigned kBytes = RowCopies::kRows * 128, kNotes = Config::kRowsBrought / 8 * 4;
      const unsigned there = places_.to_other();
#pragma unroll
      for (int j = 0; j < channels_of(half).count; ++j) {
        const unsigned rows =
            places_.k(stage) + (channels_of(half).chunk + j) * Config::kChunkBytes + RowCopies::first() * 128;
        ptx::copy_to_block(rows + there, rows, kBytes, full + there);
      }
      if (threadIdx.x / 32 % RowCopies::kWarps == 0) {
        return ptx::arrive_expecting(full, Config::kRowsBrought * 128 * channels_of(half).count +
                                               (part_of(half) == kNotedPart ? kNotes : 0));
      }
    }
    ptx::arrive(full);
  }

  const PrefillParams& p_;
  const ptx::TensorMap& q_;
  const Places& places_;
  RowCopies copies_;
  unsigned tiles_ = 0;  // of all tasks
};

}  // namespace attune::mla
