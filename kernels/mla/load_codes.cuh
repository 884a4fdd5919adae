// SPDX-License-Identifier: Apache-2.0
// Threads that bring rows of the packed formats, through registers: codes are multiplied by their scales and rounded to
// bf16 once, the rope part is copied. Rows that are not in a cache come as in load_rows.cuh.
//
// Four lanes have a row. What a thread has of its rows is cut into pieces of 32 bytes; two or three of them are always
// on their way, for where one has been decoded, another one is fetched, over the ends of tiles too. More would be
// better but for the registers: what spills must come from the L2, as shared memory leaves little of the L1. In a
// cluster each block has half of the rows, and the copy engine brings them to the other.
#pragma once

#include "mla/code_rows.cuh"
#include "mla/load_rows.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

// In place of rows that are not there: codes and scales of zero.
static __device__ const uint4 kNoRow[(Packed::kRowBytes + 15) / 16] = {};

class CodeLoader {
 public:
  __device__ __forceinline__ CodeLoader(const PrefillParams& p, const ptx::TensorMap& q, const Places& places)
      : p_(p),
        q_(q),
        places_(places),
        to_other_(Config::kCluster > 1 ? places.to_other() : 0),
        thread_(ptx::kept(threadIdx.x)),
        offset_(ptx::kept((first_row() + threadIdx.x % 32 / kLanes) * 128 +
                          ((threadIdx.x % kLanes * 2) ^ (threadIdx.x % 32 / kLanes)) * 16)) {}

  __device__ __forceinline__ void run() {
    TaskWalk walk(p_, places_, q_);
    for (walk.take(); walk.has_task(); walk.go_on()) {
      load(walk.task(), walk.head_tile(), [&] {
        walk.copy_queries();
        walk.take();
      });
    }
  }

 private:
  static constexpr bool k656 = Config::kLoader != kernels::kMlaCodes584;
  static constexpr int kRowsOfBlock = Config::kKeys / Config::kCluster;  // that it decodes
  static constexpr int kLanes = 4, kRowsOfWarp = kRowsOfBlock / (Config::kLoaders / 32),
                       kRowsOfThread = kRowsOfWarp * kLanes / 32;
  static constexpr int kStepsOfRow = 5, kPieces = kStepsOfRow * kRowsOfThread;
  // Pieces on their way. They share registers in turns, but for the last of a tile, which has its own: so the first of
  // the next tile can be fetched before.
  static constexpr int kAhead = kRowsOfThread + 1, kLast = kPieces - 1;
  static constexpr int kFind = 1;  // the piece before which the rows of the next tile are found
  static_assert(kLast % kAhead == 0, "pieces keep their registers from tile to tile");
  __device__ __forceinline__ static constexpr int slot_of(int k) { return k == kLast ? kAhead : k % kAhead; }

  // Of a row, in steps: 656: the rope part, then 128 codes four times; 584: 128 codes three times, 64 codes, the rope
  // part. Which part of a tile that is.
  __device__ __forceinline__ static constexpr int part_of(int step) {
    return k656 ? step : step + 1 < kParts ? step + 1 : kParts - 1;
  }
  __device__ __forceinline__ static constexpr bool is_rope(int step) { return step == (k656 ? 0 : kStepsOfRow - 1); }
  __device__ __forceinline__ static constexpr int chunk_of(int step) {
    return is_rope(step) ? Packed::kNope / 64 : 2 * (k656 ? step - 1 : step);
  }
  __device__ __forceinline__ static constexpr int chunks_of(int step) {
    return is_rope(step) || 64 * chunk_of(step) + 64 == Packed::kNope ? 1 : 2;
  }
  static constexpr int kFirstPart = k656 ? 0 : 1;

  struct Piece {
    uint4 words[2];                // 16 codes of two chunks; or 16 bf16
    unsigned scale[k656 ? 1 : 2];  // as it lies in the row
  };

  __device__ __forceinline__ int lane() const { return static_cast<int>(thread_ % 32); }
  __device__ __forceinline__ static int first_row() {
    return (Config::kCluster > 1 ? ptx::cluster_rank() * kRowsOfBlock : 0) +
           static_cast<int>(threadIdx.x) / 32 * kRowsOfWarp;
  }

  template <class AfterFirst>
  __device__ __forceinline__ void load(const Task& task, int head_tile, AfterFirst&& after_first) {
    int i = task.tile_end - 1;
    bool first = true;
    const auto done = [&] {
      if (first) after_first();
      first = false;
    };
    if constexpr (Config::kDense && !Config::kSparse) {  // what is not in a cache comes last in the line
#pragma unroll 1
      for (; i >= task.tile_begin && !tile_of(task, i).cached; --i) {
        load_dense(task, head_tile, i);
        done();
      }
    }
    if (i < task.tile_begin) return;
    const CodeRows rows(p_, task, head_tile);
    answer_ = rows.ask(i, own_row());
    find(rows, i, task.tile_begin);
    go_on();
#pragma unroll
    for (int k = 0; k < kAhead; ++k) fetch(k);
    done();
#pragma unroll 1
    for (; i >= task.tile_begin; --i) load_codes(rows, task, i);
  }

  // Of the thread's rows, the one that it finds for the four lanes that share them.
  __device__ __forceinline__ int own() const { return thread_ % kRowsOfThread; }
  __device__ __forceinline__ int own_row() const { return first_row() + 8 * own() + lane() / kLanes; }
  // Finds the rows of tile i, has the L2 fetch them, and asks for those of the one before. None where there is no such
  // tile.
  __device__ __forceinline__ void find(const CodeRows& rows, int i, int tile_begin) {
    next_ = rows.find(max(i, tile_begin), own_row(), answer_);
    const bool there = next_.row != nullptr && i >= tile_begin;
    if (!there) next_ = {reinterpret_cast<const char*>(kNoRow), 0};
    const unsigned absent = __ballot_sync(0xffffffffu, !there);
    absent_ = 0;
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) absent_ |= eight_of(absent >> j) << (8 * j);
    constexpr int kFinders = kLanes / kRowsOfThread;  // lanes that have found the same row
#pragma unroll
    for (int byte = 0; byte < Packed::kRowBytes; byte += 128 * kFinders) {
      const int line = byte + lane() % kLanes / kRowsOfThread * 128;
      if (line < Packed::kRowBytes) ptx::prefetch_line(next_.row + line);
    }
    if (i > tile_begin) answer_ = rows.ask(i - 1, own_row());
  }
  // From now on those rows are fetched.
  __device__ __forceinline__ void go_on() {
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) {
      const int from = lane() / kLanes * kLanes + j;
      row_[j] = kRowsOfThread == 1 ? next_.row
                                   : reinterpret_cast<const char*>(__shfl_sync(
                                         0xffffffffu, reinterpret_cast<unsigned long long>(next_.row), from));
      if (!k656) scales_[j] = kRowsOfThread == 1 ? next_.scales : __shfl_sync(0xffffffffu, next_.scales, from);
    }
  }
  // Every fourth bit.
  __device__ __forceinline__ static unsigned eight_of(unsigned x) {
    x &= 0x11111111;
    x = (x | x >> 3) & 0x03030303;
    x = (x | x >> 6) & 0x000f000f;
    return (x | x >> 12) & 0xff;
  }
  __device__ __forceinline__ void fetch(int k) {
    const int step = k / kRowsOfThread;
    const char* const row = row_[k % kRowsOfThread];
    Piece& piece = pieces_[slot_of(k)];
    if (is_rope(step)) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        piece.words[j] = ptx::load_early_four(row + Packed::kRope + 32 * (lane() % kLanes) + 16 * j);
      return;
    }
#pragma unroll
    for (int j = 0; j < chunks_of(step); ++j)
      piece.words[j] = ptx::load_early_four(row + 64 * (chunk_of(step) + j) + 16 * (lane() % kLanes));
    if constexpr (k656) {
      piece.scale[0] = ptx::load_early(reinterpret_cast<const unsigned*>(row + Packed::kNope) + step - 1);
    } else {
      const auto* const scales = reinterpret_cast<const unsigned char*>(row + scales_[k % kRowsOfThread]);
#pragma unroll
      for (int j = 0; j < chunks_of(step); ++j) piece.scale[j] = ptx::load_early(scales + chunk_of(step) + j);
    }
  }

  // 16 codes, or 16 bf16: two neighbouring units of a row's chunk.
  __device__ __forceinline__ void store(int k, int stage) const {
    const int step = k / kRowsOfThread;
    const Piece& piece = pieces_[slot_of(k)];
    const unsigned line = places_.k(stage) + k % kRowsOfThread * (8 * 128) + offset_;
    if (is_rope(step)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned four[4] = {piece.words[j].x, piece.words[j].y, piece.words[j].z, piece.words[j].w};
        ptx::store_shared_four((line + chunk_of(step) * Config::kChunkBytes) ^ (16 * j), four);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < chunks_of(step); ++j) {
      const unsigned words[4] = {piece.words[j].x, piece.words[j].y, piece.words[j].z, piece.words[j].w};
      const float scale = k656 ? __uint_as_float(piece.scale[0]) : tile::e8m0_to_float(piece.scale[k656 ? 0 : j]);
      const unsigned to = line + (chunk_of(step) + j) * Config::kChunkBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned out[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const unsigned halves =
              ptx::e4m3_to_f16(static_cast<unsigned short>(words[2 * half + w / 2] >> (w % 2 * 16)));
          out[w] = ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(halves)) * scale,
                                  ptx::f16_to_float(static_cast<unsigned short>(halves >> 16)) * scale);
        }
        ptx::store_shared_four(to ^ (16 * half), out);
      }
    }
  }

  // Its first pieces have been fetched.
  __device__ __forceinline__ void load_codes(const CodeRows& rows, const Task& task, int i) {
    const Turn turn = turn_of(tiles_++);
    wait_empty(places_, turn, kKeysOnly);
    note(turn.stage);
    note_tile(p_, places_, turn.stage, task, i);
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int step = k / kRowsOfThread, part = part_of(step);
      const bool begins = k % kRowsOfThread == 0 && (step == 0 || part_of(step - 1) != part);
      const bool ends = (k + 1) % kRowsOfThread == 0 && (step + 1 == kStepsOfRow || part_of(step + 1) != part);
      if (begins && (part == 1 || part == 3)) wait_empty(places_, turn, half_of(part));
      if (k == kFind) find(rows, i - 1, task.tile_begin);
      store(k, turn.stage);
      if (k + kAhead <= kLast) fetch(k + kAhead);
      if (k == kLast - kAhead) go_on();
      if (k >= kLast - kAhead && k < kLast) fetch(k - (kLast - kAhead));
      if (ends) hand_over(turn.stage, part, true);
    }
  }
  // Tells the math groups which rows are not there.
  __device__ __forceinline__ void note(int stage) const {
    if (lane() >= kRowsOfThread) return;
    const int word = first_row() / 8 + lane();
    const unsigned at = places_.note(stage) + 4 * word, x = (absent_ >> (8 * lane()) & 0xff) << (word % 4 * 8);
    ptx::store_shared_u32(at, x);
    if constexpr (Config::kCluster > 1)
      ptx::store_async(at + to_other_, x, places_.k_full(stage, kFirstPart) + to_other_);
  }
  // A part that the warp has decoded, or copied: in a cluster its rows, if decoded, go to the other block too, as
  // theirs come from there. Those of a chunk lie side by side.
  __device__ __forceinline__ void hand_over(int stage, int part, bool decoded) const {
    constexpr unsigned kNotes = 4 * (kRowsOfBlock / 8), kBytes = kRowsOfWarp * 128;
    const bool shared = Config::kCluster > 1 && decoded;
    if (shared) ptx::fence_async_proxy();
    __syncwarp();
    if (!ptx::elect()) return;
    const unsigned full = places_.k_full(stage, part);
    if (shared) {
#pragma unroll
      for (int j = 0; j < part_at(part).count; ++j) {
        const unsigned rows = places_.k(stage) + (part_at(part).chunk + j) * Config::kChunkBytes + first_row() * 128;
        ptx::copy_to_block(rows + to_other_, rows, kBytes, full + to_other_);
      }
    }
    if (shared && thread_ < 32) {
      ptx::arrive_expecting(full, kRowsOfBlock * 128 * part_at(part).count + (part == kFirstPart ? kNotes : 0));
    } else {
      ptx::arrive(full);
    }
  }

  __device__ __forceinline__ void load_dense(const Task& task, int head_tile, int i) {
    RowCopies copies(p_, places_);
    const Turn turn = turn_of(tiles_++);
    copies.find(task, head_tile, i, copies.ask(task, head_tile, i));
    copies.copy_tile(turn, task, i, [](int) {});
    ptx::commit_copies();
    ptx::wait_copies<0>();
#pragma unroll
    for (int part = kFirstPart; part < kParts; ++part) hand_over(turn.stage, part, false);
    __syncwarp();
  }

  const PrefillParams& p_;
  const ptx::TensorMap& q_;
  const Places& places_;
  const unsigned to_other_;
  const unsigned thread_;
  const unsigned offset_;  // of the first unit of the thread's first row in a chunk
  unsigned tiles_ = 0;     // of all tasks
  int answer_ = -1;        // for the row of the tile that is found next
  unsigned absent_ = 0;    // of the warp's rows of the tile that is decoded next
  RowPlace next_;          // of the next tile
  const char* row_[kRowsOfThread];
  int scales_[kRowsOfThread];  // of 584: how far from the row they are
  Piece pieces_[kAhead + 1];
};

}  // namespace attune::mla
