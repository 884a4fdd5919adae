// SPDX-License-Identifier: Apache-2.0
// Threads that bring keys row by row, from where a list or a table says: 16-bit rows by asynchronous copies, those of
// the packed formats through registers, where codes are multiplied by their scales and rounded to bf16 once. Rows lie
// swizzled, as the TMA would have written them. Rows that are not there, or that nobody may see, become zero.
//
// A warp has sixteen or eight rows of every tile. As many of its lanes find out where those lie, a lane a row, and lay
// the addresses down for all; then a few neighbouring lanes have a row's bytes side by side: eight those of a chunk of
// 16-bit channels, or four those of 64 codes.
#pragma once

#include "mla/load_boxes.cuh"
#include "ptx/convert.cuh"

namespace attune::mla {

class RowLoader {
 public:
  static constexpr int kLanes = Config::kDecodes ? 4 : 8;  // of a row
  static constexpr int kRowsOfWarp = Config::kKeys * 32 / Config::kLoaders, kRowsAtATime = 32 / kLanes;
  static constexpr int kRowsOfThread = kRowsOfWarp / kRowsAtATime;

  __device__ __forceinline__ RowLoader(const PrefillParams& p, const ptx::TensorMap& q, const Places& places)
      : p_(p), q_(q), places_(places) {}

  // The first warp also takes tasks and has the queries copied.
  __device__ __forceinline__ void run() {
    prefill::TaskFeed feed(p_, places_);
    const bool leads = threadIdx.x < 32;
    for (Turn turn;; turn.next<kernels::kTaskSlots>()) {
      if (leads) feed.next();
      ptx::wait_phase(places_.task_full(turn.stage), turn.parity);
      if (places_.head_tile(turn.stage) == prefill::kNoMoreTasks) return;
      load(places_.task(turn.stage), places_.head_tile(turn.stage), leads);
      __syncwarp();
      if (!leads && lane() == 0) ptx::arrive(places_.task_empty(turn.stage));
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int first_row() { return threadIdx.x / 32 * kRowsOfWarp; }  // of the warp's
  // Tile i of a task: computed anew wherever it is needed, as what is needed of it is little and registers are few.
  __device__ __forceinline__ static Tile tile_of(const Task& task, int i) {
    return tile_at(task, Line(task.num_cached, task.first_key, task.end_key), i);
  }
  __device__ __forceinline__ static bool is_coded(const Task& task, int i) {
    return Config::kDecodes && (Config::kSparse || !Config::kDense || tile_of(task, i).cached);
  }

  __device__ __forceinline__ void load(const Task& task, int head_tile, bool leads) {
    int i = task.tile_end - 1;
    find(task, head_tile, i, ask(task, head_tile, i));
    if (is_coded(task, i)) fetch_ahead();
    bool first = leads;
#pragma unroll 1
    for (; i >= task.tile_begin; --i) {
      // Before the first tile there is none: then it is found once more, for nothing.
      const int next = max(i - 1, task.tile_begin), answer = ask(task, head_tile, next);
      const bool more = next < i && is_coded(task, next);
      const auto go_on = [&] { find(task, head_tile, next, answer); };
      if (is_coded(task, i)) {
        load_codes(task, i, more, go_on);
      } else {
        load_tile(task, i);
        go_on();
        if (more) fetch_ahead();
      }
      if (first) {
        ptx::wait_phase(places_.q_empty(), q_parity_);
        q_parity_ ^= 1;
        load_queries(p_, places_, q_, task, head_tile);
        first = false;
      }
    }
  }

  // ---- where rows lie

  __device__ __forceinline__ int own_row() const { return first_row() + lane() % kRowsOfWarp; }
  __device__ __forceinline__ int kv_head(int head_tile) const { return head_tile * p_.heads_of_tile / p_.group; }
  // What the list or the table says of the lane's row of tile i.
  __device__ __forceinline__ int ask(const Task& task, int head_tile, int i) const {
    const Tile tile = tile_of(task, i);
    return Source(p_, task, kv_head(head_tile), tile).ask(tile.start + own_row());
  }
  // Lays down where the warp's rows are. answer: what ask() said.
  __device__ __forceinline__ void find(const Task& task, int head_tile, int i, int answer) {
    const Tile tile = tile_of(task, i);
    const Source source(p_, task, kv_head(head_tile), tile);
    const int key = tile.start + own_row();
    const char* const row = source.find(key, answer);
    absent_ = __ballot_sync(0xffffffffu, row == nullptr) & ((1u << kRowsOfWarp) - 1);
    __syncwarp();  // all lanes have read what was there
    if (lane() < kRowsOfWarp) {
      RowPlace& place = *places_.row(own_row());
      place.row = row;
      if (Config::kLoader == kernels::kMlaCodes584) place.scales = source.scales_of(key, answer);
    }
    __syncwarp();
    if (Config::kDecodes && row != nullptr) prefetch(row);
  }
  // Has the L2 fetch the warp's rows, which are loaded a part at a time. row: of the lane, one of those that share it.
  __device__ __forceinline__ static void prefetch(const char* row) {
    constexpr int kStep = 32 / kRowsOfWarp * 128;
#pragma unroll
    for (int byte = 0; byte < Packed::kRowBytes; byte += kStep) {
      const int line = byte + lane() / kRowsOfWarp * 128;
      if (line < Packed::kRowBytes) ptx::prefetch_line(row + line);
    }
  }
  // The thread's i-th row of a tile, and where that lies.
  __device__ __forceinline__ int row(int i) const { return first_row() + kRowsAtATime * i + lane() / kLanes; }
  __device__ __forceinline__ const RowPlace& found(int i) const { return *places_.row(row(i)); }

  // Tells the math groups which rows are not there. After the stage is empty, before it is handed over.
  __device__ __forceinline__ void note(int stage, const Task& task, int i) {
    const unsigned at = places_.note(stage) + first_row() / 8;
    if (lane() == 0) {
      if constexpr (kRowsOfWarp == 16) {
        ptx::store_shared_u16(at, static_cast<unsigned short>(absent_));
      } else {
        ptx::store_shared_u8(at, absent_);
      }
    }
    if (!Config::kSparse && threadIdx.x == 0) {
      const Tile tile = tile_of(task, i);
      ptx::store_shared_u32(places_.note(stage) + 8, static_cast<unsigned>(tile.start));
      ptx::store_shared_u32(places_.note(stage) + 12, is_edge(p_, task, tile) ? 1 : 0);
    }
  }

  // ---- 16-bit rows

  // Where 16 bytes of the thread's i-th row go, `unit` of the eight of a chunk.
  __device__ __forceinline__ unsigned place(int stage, int chunk, int i, int unit) const {
    return places_.k(stage) + chunk * Config::kChunkBytes + row(i) * 128 + ((unit ^ (row(i) & 7)) * 16);
  }

  // kCount chunks from kChunk on, which begin at byte kFrom of a row.
  template <int kChunk, int kCount, int kFrom>
  __device__ __forceinline__ void copy(int stage) const {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const char* const at = found(i).row;
#pragma unroll
      for (int unit = lane() % kLanes; unit < 8; unit += kLanes) {
        const char* const from = at != nullptr ? at + kFrom + 16 * unit : p_.q;
        const int step = at != nullptr ? 128 : 0;
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          ptx::copy_async<16>(place(stage, kChunk + j, i, unit), from + j * step, at != nullptr ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ void wait_empty(const Turn& turn, int half) const {
    ptx::wait_phase(places_.k_empty(turn.stage, half), turn.parity ^ 1);
  }

  __device__ __forceinline__ void load_tile(const Task& task, int i) {
    const Turn turn{static_cast<int>(tiles_ % 2), tiles_ / 2 % 2};
    ++tiles_;
    wait_empty(turn, kKeysOnly);
    note(turn.stage, task, i);
    load_part<0>(turn), load_part<1>(turn), load_part<2>(turn), load_part<3>(turn), load_part<4>(turn);
  }
  template <int kPart>
  __device__ __forceinline__ void load_part(const Turn& turn) const {
    constexpr Part kChannels = part_at(kPart);
    if (kPart == 1 || kPart == 3) wait_empty(turn, half_of(kPart));
    if constexpr (kChannels.count > 0) {
      copy<kChannels.chunk, kChannels.count, 128 * kChannels.chunk>(turn.stage);
      hand_over(turn.stage, kPart);
    }
  }
  // The copies count when they are there; what has been stored, now.
  __device__ __forceinline__ void hand_over(int stage, int part) const {
    ptx::arrive_after_copies(places_.k_full(stage, part));
    ptx::arrive(places_.k_full(stage, part));
  }

  // ---- packed formats

  static constexpr bool k656 = Config::kLoader == kernels::kMlaCodes656;
  // A thread's codes of a part of 128 channels: 16 of either chunk of each row, and their scales.
  struct Codes {
    uint4 words[kRowsOfThread][2];
    float scale[kRowsOfThread][k656 ? 1 : 2];
  };
  // Whether a chunk is of codes.
  __device__ __forceinline__ static constexpr bool coded(int chunk) { return 64 * chunk < Packed::kNope; }

  __device__ __forceinline__ void fetch(int part, Codes& c) const {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const RowPlace place = found(i);
      const char* const at = place.row;
      const bool there = at != nullptr;
      if constexpr (k656) c.scale[i][0] = there ? Packed::load_scale(at + Packed::kNope, part - 1, true) : 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = 2 * (part - 1) + half;
        if (!coded(chunk)) continue;
        c.words[i][half] = make_uint4(0, 0, 0, 0);
        if (there) c.words[i][half] = *reinterpret_cast<const uint4*>(at + 64 * chunk + 16 * (lane() % kLanes));
        if constexpr (!k656) c.scale[i][half] = there ? Packed::load_scale(at + place.scales, chunk) : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void fetch_ahead() { fetch(1, codes_); }

  __device__ __forceinline__ void decode(int stage, int part, const Codes& c) const {
    const int unit = lane() % kLanes * 2;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = 2 * (part - 1) + half;
        if (!coded(chunk)) continue;
        const unsigned words[4] = {c.words[i][half].x, c.words[i][half].y, c.words[i][half].z, c.words[i][half].w};
        const float scale = c.scale[i][k656 ? 0 : half];
        unsigned out[8];
#pragma unroll
        for (int w = 0; w < 8; ++w) {
          const unsigned halves = ptx::e4m3_to_f16(static_cast<unsigned short>(words[w / 2] >> (w % 2 * 16)));
          out[w] = ptx::pack_bf16(ptx::f16_to_float(static_cast<unsigned short>(halves)) * scale,
                                  ptx::f16_to_float(static_cast<unsigned short>(halves >> 16)) * scale);
        }
        ptx::store_shared_four(place(stage, chunk, i, unit), out);
        ptx::store_shared_four(place(stage, chunk, i, unit + 1), out + 4);
      }
    }
  }

  // The codes of part 1 have been fetched. go_on() finds the rows of the next tile; where more is to come, the
  // first codes of those have been fetched afterwards.
  template <class GoOn>
  __device__ __forceinline__ void load_codes(const Task& task, int i, bool more, GoOn&& go_on) {
    const Turn turn{static_cast<int>(tiles_ % 2), tiles_ / 2 % 2};
    ++tiles_;
    wait_empty(turn, kKeysOnly);
    note(turn.stage, task, i);
    if constexpr (k656) {
      copy<Config::kChunksV, 1, Packed::kRope>(turn.stage);
      hand_over(turn.stage, 0);
    }
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      if (part == 1 || part == 3) wait_empty(turn, half_of(part));
      decode(turn.stage, part, codes_);
      if (part + 1 < kParts) fetch(part + 1, codes_);
      if (part == kParts - 2) {
        if constexpr (!k656) copy<Config::kChunksV - 1, 1, Packed::kRope>(turn.stage);
        go_on();
      }
      if (part == kParts - 1 && more) fetch_ahead();
      ptx::fence_async_proxy();
      hand_over(turn.stage, part);
    }
  }

  const PrefillParams& p_;
  const ptx::TensorMap& q_;
  const Places& places_;
  unsigned tiles_ = 0;  // of all tasks
  unsigned q_parity_ = 1;
  unsigned absent_ = 0;  // of the warp's rows, a bit each
  Codes codes_;          // on their way
};

}  // namespace attune::mla
