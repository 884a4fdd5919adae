// SPDX-License-Identifier: Apache-2.0
// Threads that bring keys row by row, from where a list or a table says: 16-bit rows by asynchronous copies, those of
// the packed formats through registers, where codes are multiplied by their scales and rounded to bf16 once. Rows lie
// swizzled, as the TMA would have written them. Rows that are not there, or that nobody may see, become zero.
//
// A few neighbouring threads have a row's bytes side by side: eight those of a chunk of 16-bit channels, or four those of 64
// codes.
#pragma once

#include "mla/load_boxes.cuh"
#include "ptx/convert.cuh"

namespace attune::mla {

class RowLoader {
 public:
  static constexpr int kLanes = Config::kDecodes ? 4 : 8;  // of a row
  static constexpr int kRowsAtATime = 32 / kLanes, kRowsOfWarp = Config::kKeys * 32 / Config::kLoaders, kRowsOfThread = kRowsOfWarp / kRowsAtATime;

  __device__ __forceinline__ RowLoader(const PrefillParams& p, const ptx::TensorMap& q, const Places& places)
      : p_(p), q_(q), places_(places), thread_(static_cast<int>(threadIdx.x)),
        row_(thread_ / 32 * kRowsOfWarp + thread_ % 32 / kLanes) {}

  // The first warp also takes tasks and has the queries copied.
  __device__ __forceinline__ void run() {
    prefill::TaskFeed feed(p_, places_);
    const bool leads = thread_ < 32;
    for (Turn turn;; turn.next<kernels::kTaskSlots>()) {
      if (leads) feed.next();
      ptx::wait_phase(places_.task_full(turn.stage), turn.parity);
      if (places_.head_tile(turn.stage) == prefill::kNoMoreTasks) return;
      load(places_.task(turn.stage), places_.head_tile(turn.stage), leads);
      __syncwarp();
      if (!leads && thread_ % 32 == 0) ptx::arrive(places_.task_empty(turn.stage));
    }
  }

 private:
  // What a thread knows of its rows of a tile.
  struct Answers {
    int of[kRowsOfThread];
  };
  struct Addresses {
    const char* of[kRowsOfThread];  // null: zeros
    int scales[kRowsOfThread];      // MLA-584: how far from there
  };
  __device__ __forceinline__ int row(int i) const { return row_ + kRowsAtATime * i; }

  __device__ __forceinline__ Answers ask(const Source& source, const Tile& tile) const {
    Answers answers;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) answers.of[i] = source.ask(tile.start + row(i));
    return answers;
  }
  __device__ __forceinline__ Addresses find(const Source& source, const Tile& tile, const Answers& answers) const {
    Addresses a;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      a.of[i] = source.find(tile.start + row(i), answers.of[i]);
      if constexpr (Config::kLoader == kernels::kMlaCodes584) a.scales[i] = source.scales_of(tile.start + row(i), answers.of[i]);
    }
    return a;
  }

  __device__ __forceinline__ void load(const Task& task, int head_tile, bool leads) {
    const int kv_head = head_tile * p_.heads_of_tile / p_.group, begin = task.tile_begin, last = task.tile_end - 1;
    const Line line(task.num_cached, task.first_key, task.end_key);
    Tile tile = tile_at(task, line, last);
    Addresses a;
    {
      const Source source(p_, task, kv_head, tile);
      a = find(source, tile, ask(source, tile));
    }
    if (is_coded(tile)) fetch(a, 1, codes_[0]), fetch(a, 2, codes_[1]);
#pragma unroll 1
    for (int i = last; i >= begin; --i) {
      const bool more = i > begin;
      const Tile next = tile_at(task, line, more ? i - 1 : i);
      const Source source(p_, task, kv_head, next);
      const Answers answers = ask(source, next);
      const auto go_on = [&] { a = find(source, next, answers); };
      if (is_coded(tile)) {
        load_codes(task, tile, a, more && is_coded(next), go_on);
      } else {
        load_tile(task, tile, a);
        go_on();
        if (more && is_coded(next)) fetch(a, 1, codes_[0]), fetch(a, 2, codes_[1]);
      }
      if (leads && i == last) {
        ptx::wait_phase(places_.q_empty(), q_parity_);
        q_parity_ ^= 1;
        load_queries(p_, places_, q_, task, head_tile);
      }
      tile = next;
    }
  }
  __device__ __forceinline__ static bool is_coded(const Tile& tile) {
    return Config::kDecodes && (Config::kSparse || tile.cached);
  }

  // Which of the tile's rows are not there; a warp has sixteen or eight of them.
  __device__ __forceinline__ void note_hidden(int stage, const Task& task, const Tile& tile, const Addresses& a) {
    bool absent = false;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) absent |= a.of[i] == nullptr;
    if (__any_sync(0xffffffffu, absent) || (noted_ >> stage & 1) != 0) {
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        const unsigned lanes = __ballot_sync(0xffffffffu, a.of[i] == nullptr);
#pragma unroll
        for (int r = 0; r < kRowsAtATime; ++r) bits |= (lanes >> (r * kLanes) & 1) << (kRowsAtATime * i + r);
      }
      const unsigned at = places_.note(stage) + thread_ / 32 * (kRowsOfWarp / 8);
      if (thread_ % 32 == 0) {
        if constexpr (kRowsOfWarp == 16) {
          ptx::store_shared_u16(at, static_cast<unsigned short>(bits));
        } else {
          ptx::store_shared_u8(at, bits);
        }
      }
      noted_ = bits != 0 ? noted_ | 1u << stage : noted_ & ~(1u << stage);
    }
    if (!Config::kSparse && thread_ == 0) {
      ptx::store_shared_u32(places_.note(stage) + 8, static_cast<unsigned>(tile.start));
      ptx::store_shared_u32(places_.note(stage) + 12, is_edge(p_, task, tile) ? 1 : 0);
    }
  }

  // Where 16 bytes of the thread's i-th row go, `unit` of the eight of a chunk.
  __device__ __forceinline__ unsigned place(int stage, int chunk, int i, int unit) const {
    return places_.k(stage) + chunk * Config::kChunkBytes + row(i) * 128 + ((unit ^ (row(i) & 7)) * 16);
  }

  // 16-bit channels: kCount chunks from kChunk on, which begin at byte kFrom of a row.
  template <int kChunk, int kCount, int kFrom>
  __device__ __forceinline__ void copy(int stage, const Addresses& a) const {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
#pragma unroll
      for (int unit = 0; unit < 8; unit += kLanes) {
        const int own = unit + thread_ % kLanes;
        const char* const from = a.of[i] != nullptr ? a.of[i] + 16 * own : p_.q;
        const unsigned to = place(stage, 0, i, own), there = a.of[i] != nullptr ? 16 : 0;
        const int step = a.of[i] != nullptr ? 1 : 0;
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          ptx::copy_async<16>(to + (kChunk + j) * Config::kChunkBytes, from + (kFrom + 128 * j) * step, there);
      }
    }
  }

  __device__ __forceinline__ void wait_empty(const Turn& turn, int half) const {
    ptx::wait_phase(places_.k_empty(turn.stage, half), turn.parity ^ 1);
  }

  __device__ __forceinline__ void load_tile(const Task& task, const Tile& tile, const Addresses& a) {
    const Turn turn = turn_;
    turn_.next<Config::kStages>();
    wait_empty(turn, kKeysOnly);
    note_hidden(turn.stage, task, tile, a);
    load_part<0>(turn, a), load_part<1>(turn, a), load_part<2>(turn, a), load_part<3>(turn, a), load_part<4>(turn, a);
  }
  template <int kPart>
  __device__ __forceinline__ void load_part(const Turn& turn, const Addresses& a) const {
    constexpr Part kChannels = part_at(kPart);
    if (kPart == 1 || kPart == 3) wait_empty(turn, half_of(kPart));
    if constexpr (kChannels.count > 0) {
      copy<kChannels.chunk, kChannels.count, 128 * kChannels.chunk>(turn.stage, a);
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
  static constexpr int kRope = k656 ? 528 : 448;  // where the 64 bf16 begin
  static constexpr int kCodes = k656 ? 512 : 448;
  // A thread's codes of a part of 128 channels: 16 of either chunk, and their scales.
  struct Codes {
    uint4 words[kRowsOfThread][2];
    float scale[kRowsOfThread][k656 ? 1 : 2];
  };
  // Whether a chunk is of codes.
  __device__ __forceinline__ static constexpr bool coded(int chunk) { return 64 * chunk < kCodes; }

  __device__ __forceinline__ void fetch(const Addresses& a, int part, Codes& c) const {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      if constexpr (k656) c.scale[i][0] = a.of[i] == nullptr ? 0 : *reinterpret_cast<const float*>(a.of[i] + 512 + 4 * (part - 1));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = 2 * (part - 1) + half;
        c.words[i][half] = make_uint4(0, 0, 0, 0);
        if (!coded(chunk)) continue;
        if constexpr (!k656) c.scale[i][half] = 0;
        if (a.of[i] == nullptr) continue;
        c.words[i][half] = *reinterpret_cast<const uint4*>(a.of[i] + 64 * chunk + 16 * (thread_ % kLanes));
        if constexpr (!k656)
          c.scale[i][half] = scale_of_exponent(*reinterpret_cast<const unsigned char*>(a.of[i] + a.scales[i] + chunk));
      }
    }
  }
  // 2^(e - 127); 255 is NaN.
  __device__ __forceinline__ static float scale_of_exponent(unsigned e) {
    return __uint_as_float(e == 0 ? 0x400000u : e == 255 ? 0x7fc00000u : e << 23);
  }

  __device__ __forceinline__ void decode(int stage, int part, const Codes& c) const {
    const int unit = thread_ % kLanes * 2;
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

  // The codes of parts 1 and 2 have been fetched. Leaves `a` to what go_on() makes of it, and where more is to come those
  // of the next tile.
  template <class GoOn>
  __device__ __forceinline__ void load_codes(const Task& task, const Tile& tile, Addresses& a, bool more, GoOn&& go_on) {
    const Turn turn = turn_;
    turn_.next<Config::kStages>();
    wait_empty(turn, kKeysOnly);
    note_hidden(turn.stage, task, tile, a);
    if constexpr (k656) {
      copy<Config::kChunksV, 1, kRope>(turn.stage, a);
      hand_over(turn.stage, 0);
    }
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      if (part == 1 || part == 3) wait_empty(turn, half_of(part));
      decode(turn.stage, part, codes_[(part - 1) % 2]);
      if (part <= 2) fetch(a, part + 2, codes_[(part - 1) % 2]);
      if (part == 2) {
        if constexpr (!k656) {
          wait_empty(turn, half_of(4));
          copy<Config::kChunksV - 1, 1, kRope>(turn.stage, a);
        }
        go_on();
      }
      if (part > 2 && more) fetch(a, part - 2, codes_[(part - 1) % 2]);
      ptx::fence_async_proxy();
      hand_over(turn.stage, part);
    }
  }

  const PrefillParams& p_;
  const ptx::TensorMap& q_;
  const Places& places_;
  const int thread_;
  const int row_;  // the first of the thread's in a tile
  Turn turn_;
  unsigned q_parity_ = 1;
  unsigned noted_ = (1 << Config::kStages) - 1;  // stages whose note says something, a bit each
  Codes codes_[2];                               // on their way
};

}  // namespace attune::mla
