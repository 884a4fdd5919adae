// SPDX-License-Identifier: Apache-2.0
// Threads that bring rows of the packed formats: a row lands in shared memory as it is, and its codes are decoded
// there: multiplied by their scales and rounded to bf16 once. Rows that are not in a cache come as in load_rows.cuh.
//
// There is no room beside the tiles, so codes land in the first half of V of their own tile's buffer, which is empty
// before the second: 128 codes of a row in each of its four chunks, in the place of that row. They are decoded in an
// order in which nothing is overwritten that is still needed.
//
//   chunks            0    1    2    3    4    5    6    7    8
//   landed            c1   c2   c3   c4                       rope (656)
//   c2 is read; c1    V1   V1   c3   c4
//   c3, c4            V1   V1   c3   c4   V3   V3   V4   V4
//   c2                V1   V1   V2   V2   V3   V3   V4   V4
//
// A warp has eight rows of every tile, from the first byte to the last; four lanes decode a row. The copies of the next
// tile begin as soon as its buffer is empty, which is asked for in between. In a cluster each block has half of the
// rows, and the copy engine brings them to the other.
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
        codes_(ptx::kept(decoded_row() * 128 + ((lane() % kLanes) ^ raw_swizzle(decoded_row())) * 16)),
        units_(ptx::kept(decoded_row() * 128 + ((lane() % kLanes * 2) ^ (decoded_row() & 7)) * 16)) {}

  __device__ __forceinline__ void run() {
    TaskWalk walk(p_, places_, q_);
    for (walk.take_first(); walk.has_task(); walk.go_on()) {
      load(walk.task(), walk.head_tile(), [&] { walk.copy_queries(); }, [&] { walk.take(); });
    }
  }

 private:
  static constexpr bool k656 = Config::kLoader != kernels::kMlaCodes584;
  static constexpr int kRowsOfBlock = Config::kKeys / Config::kCluster;  // that it decodes
  static constexpr int kLanes = 4, kRowsOfWarp = kRowsOfBlock / (Config::kLoaders / 32),
                       kRowsOfThread = kRowsOfWarp * kLanes / 32;  // one in eight of the warp's

  // Parts 1 to 4 are 128 codes each; of 584 the last is 64 codes and the rope part, which is a part of its own in 656.
  static constexpr int kRopeChunk = Packed::kNope / 64, kRopePart = k656 ? 0 : 4;
  static constexpr int kFirstPart = k656 ? 0 : 1;
  // Codes of the next part before those of this one are decoded.
  static constexpr bool kReadsAhead = Config::kLoaderRegisters > 48;
  __device__ __forceinline__ static constexpr unsigned chunks_of(int part) { return part < 4 || k656 ? 2 : 1; }

  // Computed anew wherever it is asked for, with what follows from it, as registers are scarce.
  __device__ __forceinline__ unsigned lane() const { return ptx::kept(thread_) % 32; }
  __device__ __forceinline__ unsigned first_row() const {
    return (Config::kCluster > 1 ? ptx::cluster_rank() * kRowsOfBlock : 0) + ptx::kept(thread_) / 32 * kRowsOfWarp;
  }
  // The first of the rows that the lane decodes with its three neighbours.
  __device__ __forceinline__ unsigned decoded_row() const { return first_row() + lane() / kLanes; }
  // Those are found by the four for several tiles at a time: which of them, and in which tile, by this lane.
  static constexpr int kFound = kLanes / kRowsOfThread;
  __device__ __forceinline__ int found_row() const {
    return static_cast<int>(decoded_row() + lane() % kRowsOfThread * 8);
  }
  __device__ __forceinline__ int found_tile() const { return static_cast<int>(lane() % kLanes / kRowsOfThread); }
  // Units of 16 bytes of a row as it landed: eight lanes that read four units of two rows have them from all banks.
  __device__ __forceinline__ static constexpr unsigned raw_swizzle(unsigned row) { return row % 2 * 4; }

  // after_copy, after_first: to be called once, when the first tile is under way, and when it is there.
  template <class AfterCopy, class AfterFirst>
  __device__ __forceinline__ void load(const Task& task, int head_tile, AfterCopy&& after_copy,
                                       AfterFirst&& after_first) {
    int i = task.tile_end - 1;
    bool first = true;
    if constexpr (Config::kDense && !Config::kSparse) {  // what is not in a cache comes last in the line
#pragma unroll 1
      for (; i >= task.tile_begin && !tile_of(task, i).cached; --i) {
        load_dense(task, head_tile, i);
        if (first) after_copy(), after_first();
        first = false;
      }
    }
    if (i < task.tile_begin) return;
    const CodeRows rows(p_, task, head_tile);
    ask(rows, i, task.tile_begin);
    if (!Config::kSparse && thread_ < 32) find_plain(task);
    position_ = kFound - 1;
    go_on(rows, i, task.tile_begin);
    wait_for_buffer();
    copy(task, i);
    if (first) after_copy();
#pragma unroll 1
    for (; i >= task.tile_begin; --i) {
      decode(rows, task, i);
      if (first) after_first();
      first = false;
    }
  }

  // Asks for the rows of tile i and those before it that are found with it.
  __device__ __forceinline__ void ask(const CodeRows& rows, int i, int tile_begin) {
    i -= found_tile();
    if (i >= tile_begin) answer_ = rows.ask(i, found_row());
  }
  // Tile i is copied next: finds its rows, with those of the tiles before it, unless they have been, and has the L2
  // fetch them. None where there is no such tile.
  __device__ __forceinline__ void go_on(const CodeRows& rows, int i, int tile_begin) {
    position_ = (position_ + 1) % kFound;
    if (position_ == 0) {
      const int own = i - found_tile();
      found_ = rows.find(max(own, tile_begin), found_row(), answer_);
      const bool there = found_.row != nullptr && own >= tile_begin;
      if (!there) found_ = {reinterpret_cast<const char*>(kNoRow), 0};
      absent_ = __ballot_sync(0xffffffffu, !there);
      ask(rows, i - kFound, tile_begin);
    }
    // A row's lines are spread over those of the four lanes that know it.
    const char* const row = row_of(found_.row, who_found(lane() % kRowsOfThread), kLanes) + found_tile() * 128;
#pragma unroll
    for (int byte = 0; byte < Packed::kRowBytes; byte += 128 * kFound) {
      if (byte + found_tile() * 128 < Packed::kRowBytes) ptx::prefetch_line(row + byte);
    }
  }
  // Of each four lanes, which has found the j-th of their rows of the tile that is copied next.
  __device__ __forceinline__ unsigned who_found(unsigned j) const { return position_ * kRowsOfThread + j; }
  // What a lane of each `width` has found.
  __device__ __forceinline__ static const char* row_of(const char* found, unsigned lane, int width) {
    return reinterpret_cast<const char*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(found), lane, width));
  }

  // The buffer of the tile that is copied next: what of it is written before it is decoded.
  __device__ __forceinline__ bool buffer_is_empty() const {
    const Turn turn = turn_of(copied_);
    bool empty = true;
#pragma unroll
    for (int half = 0; half < 3; ++half) {
      if (is_written_early(half))
        empty = empty && ptx::phase_has_ended(places_.k_empty(turn.stage, half), turn.parity ^ 1);
    }
    return !__any_sync(0xffffffffu, !empty);
  }
  __device__ __forceinline__ void wait_for_buffer() const {
#pragma unroll
    for (int half = 0; half < 3; ++half)
      if (is_written_early(half)) wait_empty(places_, turn_of(copied_), half);
  }
  // The note, codes, and the rope part.
  __device__ __forceinline__ static constexpr bool is_written_early(int half) {
    return half == kKeysOnly || half == 1 || half == half_of(kRopePart);
  }

  // Has the rows that have been found, tile i, copied as they are.
  __device__ __forceinline__ void copy(const Task& task, int i) {
    const int stage = turn_of(copied_++).stage;
    // A lane has 16 bytes of each 128 of every fourth row.
    const unsigned mine = lane(), unit = mine % 8, row = mine / 8, line = places_.k(stage) + (first_row() + row) * 128;
    const unsigned codes = line + (unit ^ raw_swizzle(row)) * 16;
    const unsigned rope = line + kRopeChunk * Config::kChunkBytes + (unit ^ row) * 16;
#pragma unroll
    for (int j = 0; j < kRowsOfWarp / 4; ++j) {
      const char* const from = row_of(found_.row, kLanes * (4 * j % 8 + row) + who_found(j / 2), 32) + 16 * unit;
#pragma unroll
      for (int part = 1; part < kParts; ++part) {
        if (unit < 4 * chunks_of(part))
          ptx::copy_async<16>(codes + j * (4 * 128) + (part - 1) * Config::kChunkBytes, from + 128 * (part - 1), 16);
      }
      ptx::copy_async<16>((rope ^ (j % 2 * 64)) + j * (4 * 128), from + Packed::kRope, 16);
    }
    ptx::commit_copies();
    // A lane has one of the scales of its rows; of 584 two.
#pragma unroll
    for (int j = 0; j < kRowsOfThread; ++j) {
      const char* const row = row_of(found_.row, who_found(j), kLanes);
      if constexpr (k656) {
        scales_[j] = ptx::load_early(reinterpret_cast<const unsigned*>(row + Packed::kNope) + mine % kLanes);
      } else {
        const char* const scales = row + __shfl_sync(0xffffffffu, found_.scales, who_found(j), kLanes);
        scales_[j] = ptx::load_early(reinterpret_cast<const unsigned short*>(scales) + mine % kLanes);
      }
    }
    note(stage);
    note_edge(task, i, stage);
  }
  // The task's tiles of which all of the block's rows see all keys: found once, as the first warp would be the last to
  // have its rows decoded if it asked at every tile.
  __device__ __forceinline__ void find_plain(const Task& t) {
    const int position = t.num_keys - t.num_q + t.token_begin;
    const int low = max(t.first_key, prefill::first_visible(p_, position + t.num_tokens - 1));
    const int high = min(min(t.end_key, t.num_cached), prefill::end_visible(p_, t.num_keys, position));
    if (thread_ != 0) return;
    ptx::store_shared_u32(plain(), (low + Config::kKeys - 1) / Config::kKeys - t.first_key / Config::kKeys);
    ptx::store_shared_u32(plain() + 4, high / Config::kKeys - t.first_key / Config::kKeys);
  }
  // Where [begin, end) of them lie, of no use but to the first thread: in place of rows' addresses, as registers are
  // scarce.
  __device__ __forceinline__ unsigned plain() const { return places_.base + Config::kShared.rows; }
  // As note_tile().
  __device__ __forceinline__ void note_edge(const Task& task, int i, int stage) const {
    if (Config::kSparse || thread_ != 0) return;
    const unsigned at = places_.note(stage) + 4 * Config::kHiddenWords;
    const bool edge = i < static_cast<int>(ptx::load_shared_u32(plain())) ||
                      i >= static_cast<int>(ptx::load_shared_u32(plain() + 4));
    if (edge) {
      const int start = (task.first_key / Config::kKeys + i) * Config::kKeys;
      ptx::store_shared_u32(at, static_cast<unsigned>(start));
    }
    ptx::store_shared_u32(at + 4, edge ? 1 : 0);
  }
  // Tells the math groups which rows are not there.
  __device__ __forceinline__ void note(int stage) const {
    if (lane() >= kRowsOfThread) return;
    // A bit of each four lanes.
    unsigned absent = absent_ >> who_found(lane()) & 0x11111111;
    absent = (absent | absent >> 3) & 0x03030303;
    absent = (absent | absent >> 6) & 0x000f000f;
    absent = (absent | absent >> 12) & 0xff;
    const unsigned word = first_row() / 8 + lane();
    const unsigned at = places_.note(stage) + 4 * word, x = absent << (word % 4 * 8);
    ptx::store_shared_u32(at, x);
    if constexpr (Config::kCluster > 1)
      ptx::store_async(at + to_other_, x, places_.k_full(stage, kFirstPart) + to_other_);
  }

  // Tile i, which is being copied.
  __device__ __forceinline__ void decode(const CodeRows& rows, const Task& task, int i) {
    const Turn turn = turn_of(copied_ - 1);
    bool copies = i > task.tile_begin;  // the next tile is still to be copied
    go_on(rows, i - 1, task.tile_begin);
    ptx::wait_copies<0>();
    __syncwarp();
    Codes first, second, third;
    read(turn.stage, 1, first);
    read(turn.stage, 2, second);
    __syncwarp();
    if (kReadsAhead) read(turn.stage, 3, third);
    write(turn.stage, 1, first, scales_of(1));
    hand_over(turn.stage, kFirstPart, 1, true);
    if (!kReadsAhead) read(turn.stage, 3, third);
    if (kReadsAhead) read(turn.stage, 4, first);
    wait_empty(places_, turn, 2);
    write(turn.stage, 3, third, scales_of(3));
    hand_over(turn.stage, 3, 3, true);
    if (!kReadsAhead) read(turn.stage, 4, first);
    write(turn.stage, 4, first, scales_of(4));
    hand_over(turn.stage, 4, 4, true);
    const Scales scales = scales_of(2);  // before those of the next tile come
    if (copies && buffer_is_empty()) {
      copy(task, i - 1);
      copies = false;
    }
    write(turn.stage, 2, second, scales);
    hand_over(turn.stage, 2, 2, true);
    if (copies) {
      wait_for_buffer();
      copy(task, i - 1);
    }
  }

  // Of a part.
  struct Scales {
    unsigned of_row[kRowsOfThread];
  };
  __device__ __forceinline__ Scales scales_of(int part) const {
    Scales scales;
#pragma unroll
    for (int row = 0; row < kRowsOfThread; ++row)
      scales.of_row[row] = __shfl_sync(0xffffffffu, scales_[row], part - 1, kLanes);
    return scales;
  }
  struct Codes {
    unsigned words[kRowsOfThread][2][4];  // of each row and chunk 16
  };
  __device__ __forceinline__ void read(int stage, int part, Codes& codes) const {
    const unsigned line = places_.k(stage) + codes_;
#pragma unroll
    for (int row = 0; row < kRowsOfThread; ++row) {
#pragma unroll
      for (unsigned j = 0; j < chunks_of(part); ++j) {
        ptx::load_shared_four((line ^ (64 * j)) + row * (8 * 128) + (part - 1) * Config::kChunkBytes,
                              codes.words[row][j]);
      }
    }
  }
  // Decodes to two neighbouring units of a row of each chunk.
  __device__ __forceinline__ void write(int stage, int part, const Codes& codes, const Scales& scales) const {
    const unsigned line = places_.k(stage) + units_;
#pragma unroll
    for (int row = 0; row < kRowsOfThread; ++row) {
      const unsigned scale = scales.of_row[row];
#pragma unroll
      for (unsigned j = 0; j < chunks_of(part); ++j) {
        const float factor = k656 ? __uint_as_float(scale) : tile::e8m0_to_float(scale >> (8 * j) & 0xff);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned out[4];
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const uint2 halves = ptx::four_e4m3_to_f16(codes.words[row][j][2 * half + w]);
            out[2 * w] = times(halves.x, factor);
            out[2 * w + 1] = times(halves.y, factor);
          }
          ptx::store_shared_four(
              (line ^ (16 * half)) + row * (8 * 128) + (part_at(part).chunk + j) * Config::kChunkBytes, out);
        }
      }
    }
  }
  // Two fp16 numbers.
  __device__ __forceinline__ static unsigned times(unsigned halves, float factor) {
    return ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(halves)) * factor,
                          ptx::f16_to_float(static_cast<unsigned short>(halves >> 16)) * factor);
  }

  // Parts that the warp has decoded, or copied: in a cluster its rows, if decoded, go to the other block too, as theirs
  // come from there. Those of a chunk lie side by side.
  __device__ __forceinline__ void hand_over(int stage, int first, int last, bool decoded) const {
    constexpr unsigned kNotes = 4 * (kRowsOfBlock / 8), kBytes = kRowsOfWarp * 128;
    const bool shared = Config::kCluster > 1 && decoded;
    if (!Config::kReadersFence) ptx::fence_async_proxy();
    __syncwarp();
    if (!ptx::elect()) return;
#pragma unroll
    for (int part = first; part <= last; ++part) {
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
  }

  __device__ __forceinline__ void load_dense(const Task& task, int head_tile, int i) {
    RowCopies copies(p_, places_);
    const Turn turn = turn_of(copied_++);
    copies.find(task, head_tile, i, copies.ask(task, head_tile, i));
    copies.copy_tile(turn, task, i);
    ptx::commit_copies();
    ptx::wait_copies<0>();
    hand_over(turn.stage, kFirstPart, kParts - 1, false);
    __syncwarp();
  }

  const PrefillParams& p_;
  const ptx::TensorMap& q_;
  const Places& places_;
  const unsigned to_other_;
  const unsigned thread_;
  const unsigned codes_;  // where the lane reads codes of its row, in a chunk
  const unsigned units_;  // where it writes the first unit
  unsigned copied_ = 0;   // tiles, of all tasks, one of which may not have been decoded
  int answer_ = -1;       // for the row that is found next
  unsigned position_;     // of the tile that is copied next, in those that have been found with it
  RowPlace found_;        // the lane's row of these
  unsigned absent_ = 0;   // where it is not there, a bit each lane
  unsigned scales_[kRowsOfThread];  // of the tile that is decoded next
};

}  // namespace attune::mla
