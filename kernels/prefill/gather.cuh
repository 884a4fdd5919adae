// SPDX-License-Identifier: Apache-2.0
// Three warps that bring K and V where the TMA does not take the cache's rows, by asynchronous copies of 4, 8 or 16
// bytes, to where the TMA or the converters would have put them: rows, swizzled, and V of an x-packed cache as
// packed.cuh has it. Of new tokens beside the cache the first of them has the TMA copy what the producer would.
//
// A lane knows of each 32 keys where one of them lies. What nobody may see, and what is on pages that are not there,
// is not read, and becomes zero.
#pragma once

#include "prefill/load.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/registers.cuh"

namespace attune::prefill {

class Gatherer : Loader {
 public:
  static constexpr int kThreads = 32 * Config::kGatherWarps;

  __device__ __forceinline__ Gatherer(const PrefillParams& p, const Maps& maps, const Places& places)
      : Loader(p, maps, places),
        warp_(static_cast<int>(threadIdx.x) / 32 - 1),
        inverse_(p.paged ? 0xffffffffu / static_cast<unsigned>(p.page_size) : 0) {}

  __device__ __forceinline__ void run() {
    for (Turn slot;; slot.next<kernels::kTaskSlots>()) {
      ptx::wait_phase(places_.task_full(slot.stage), slot.parity);
      const int head_tile = places_.head_tile(slot.stage);
      if (head_tile == kNoMoreTasks) break;
      gather(places_.task(slot.stage), kv_head_of(head_tile));
      __syncwarp();
      if (lane_ == 0) ptx::arrive(places_.task_empty(static_cast<int>(ptx::kept(slot.stage))));
    }
    hand_over_all();
  }

 private:
  static constexpr int kUnit = Config::kGather > 0 ? Config::kGather : 16;  // bytes of a copy
  static constexpr int kWarps = 3, kWords = Config::kKeys / 32;  // of 32 keys
  // A third of what is copied of a tile, in the order of its keys, lies within so many words, from first_word() on.
  static constexpr int kWordsOfWarp = kWords > 1 ? 2 : 1;
  static_assert(kWords <= 4 && (!Config::kGathers || kWarps == Config::kGatherWarps));

  // Of the lane's key of each of the warp's words: its page, as the tables say.
  struct Pages {
    int page[kWordsOfWarp];
  };
  // Of the same keys: their rows, or null.
  struct Sources {
    const char* row[kWordsOfWarp];
  };

  __device__ __forceinline__ void gather(const Task& task, int kv_head) {
    const Line line(task.num_cached, task.first_key, task.end_key);
    Pages pages = ask(task, tile_at(task, line, task.tile_end - 1), false);
#pragma unroll 1
    for (int i = task.tile_end - 1; i >= task.tile_begin; --i) {
      const Tile tile = tile_at(task, line, i);
      // Tables are asked for the next tile's pages when they are needed for this one no more.
      const auto ask_ahead = [&] {
        if (i > task.tile_begin) pages = ask(task, tile_at(task, line, i - 1), false);
      };
      if (Config::kDense && !tile.cached) {
        ask_ahead();
        new_tokens(task, kv_head, tile);
      } else {
        keys(tile, kv_head, pages);
        if (p_.v_page_table.data != nullptr) pages = ask(task, tile, true);
        const Sources rows = find<Config::kPacked ? kUnit / 2 : 1>(p_.v, tile, kv_head, pages);
        ask_ahead();
        values(tile, rows);
      }
    }
  }

  __device__ __forceinline__ void new_tokens(const Task& task, int kv_head, const Tile& tile) {
    hand_over_all();  // nothing else would before these are needed
    if (warp_ == 0) {
      load_keys(task, kv_head, tile, 0, 0);
      load_values(task, kv_head, tile, 0);
    } else {
      k_turn_.next<Config::kStages>(), v_turn_.next<Config::kValueStages>();
    }
  }

  __device__ __forceinline__ void keys(const Tile& tile, int kv_head, const Pages& pages) {
    const Turn turn = k_turn_;
    k_turn_.next<Config::kStages>();
    const Sources rows = find<1>(p_.k, tile, kv_head, pages);
    ptx::wait_phase(places_.k_empty(turn.stage), turn.parity ^ 1);
    note_hidden(places_.hidden(turn.stage), tile, pages);
    if constexpr (Config::kPacked) {
      copy_pieces(rows, places_.k(turn.stage));
    } else {
      copy_rows<Config::kHeadDimQk, 32 * Config::kStepsQk>(rows, places_.k(turn.stage));
    }
    hand_over_later(places_.k_full(turn.stage));
  }

  __device__ __forceinline__ void values(const Tile& tile, const Sources& rows) {
    const Turn turn = v_turn_;
    v_turn_.next<Config::kValueStages>();
    const unsigned to = places_.v(turn.stage), full = places_.v_full(turn.stage);
    ptx::wait_phase(places_.v_empty(turn.stage), turn.parity ^ 1);
    if constexpr (Config::kPacked) {
      copy_columns(rows, to);
      if (tile.low != tile.start || tile.high != tile.start + Config::kKeys) {
        hand_over_later(0);  // what came before
        hand_over_all();     // and this, to one another
        clear_columns<kThreads>(to, tile.low - tile.start, tile.high - tile.start, thread());
        hand_over(full);
        return;
      }
    } else {
      copy_rows<Config::kHeadDimV, 2 * Config::kChannels>(rows, to);
    }
    hand_over_later(full);
  }

  // --- Where keys lie

  __device__ __forceinline__ int first_word() const { return warp_ * kWords / kWarps; }
  // The lane's of a word of the warp's.
  __device__ __forceinline__ int key_of(const Tile& tile, int word) const {
    return tile.start + 32 * (first_word() + word) + lane_;
  }

  __device__ __forceinline__ Pages ask(const Task& task, const Tile& tile, bool values) const {
    Pages pages;
#pragma unroll
    for (int w = 0; w < kWordsOfWarp; ++w) {
      const int key = min(max(key_of(tile, w), tile.low), tile.high - 1);
      pages.page[w] = tile.cached && tile.low < tile.high ? page_of(task, key, values) : -1;
    }
    return pages;
  }
  __device__ __forceinline__ int page_of(const Task& task, int key, bool values) const {
    if (!p_.paged) return find_slot(p_, task.batch, key, values).page;
    const kernels::IntTable& table = values && p_.v_page_table.data != nullptr ? p_.v_page_table : p_.page_table;
    return int_at(table, task.batch, index_of(key));
  }
  // Of a page: the quotient as the inverse says it is at most 1 too small.
  __device__ __forceinline__ int index_of(int key) const {
    const int index = static_cast<int>(static_cast<unsigned long long>(key) * inverse_ >> 32);
    return index + (key - index * p_.page_size >= p_.page_size ? 1 : 0);
  }

  // kTogether: keys that come in one copy, of which some may be hidden.
  template <int kTogether>
  __device__ __forceinline__ Sources find(const kernels::KvPlane& plane, const Tile& tile, int kv_head,
                                          const Pages& pages) const {
    Sources rows;
#pragma unroll
    for (int w = 0; w < kWordsOfWarp; ++w) {
      const int key = key_of(tile, w), first = key & -kTogether;
      const bool seen = first < tile.high && first + kTogether > tile.low && is_there(p_, pages.page[w]);
      rows.row[w] = seen ? plane.data + pages.page[w] * plane.page_stride +
                               (p_.paged ? key - index_of(key) * p_.page_size : key) * plane.slot_stride +
                               kv_head * plane.head_stride
                         : nullptr;
    }
    return rows;
  }

  // Tells the math warps which keys lie on pages that are not there. The stage is free.
  __device__ __forceinline__ void note_hidden(unsigned at, const Tile& tile, const Pages& pages) const {
    bool any = false;
#pragma unroll
    for (int w = 0; w < kWordsOfWarp; ++w) {
      const int key = key_of(tile, w), word = first_word() + w;
      const bool bad = key >= tile.low && key < tile.high && !is_there(p_, pages.page[w]);
      const unsigned bits = __ballot_sync(0xffffffffu, bad);
      if (lane_ == 0 && word < kWords) ptx::store_shared_u32(at + 4 + 4 * word, bits);
      any |= bad;
    }
    any = ptx::any_of_some(kAllConverters, kThreads, any);
    if (thread() == 0) ptx::store_shared_u32(at, any ? 1u : 0u);
  }

  // --- Copies. What a tile needs of them is cut into parts, each of a word; the warps have a third each.

  __device__ __forceinline__ static void copy(unsigned to, const char* from, bool there) {
    ptx::copy_async_cached<kUnit>(to, from, there ? kUnit : 0);
  }
  // What comes of it is computed where it is needed: registers are scarce.
  __device__ __forceinline__ int own_lane() const {
    return static_cast<int>(ptx::kept(static_cast<unsigned>(lane_)));
  }
  __device__ __forceinline__ int begin_of(int parts) const { return warp_ * parts / kWarps; }
  __device__ __forceinline__ int end_of(int parts) const { return (warp_ + 1) * parts / kWarps; }
  // Of a word of the tile that all lanes have in common.
  __device__ __forceinline__ const char* row_of(const Sources& rows, int word) const {
    return kWordsOfWarp == 1 || word == first_word() ? rows.row[0] : rows.row[kWordsOfWarp - 1];
  }
  __device__ __forceinline__ const char* row_of(const Sources& rows, int word, int key) const {
    const auto row = reinterpret_cast<unsigned long long>(row_of(rows, word));
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, row, key));
  }

  // Rows of kHeadDim channels side by side, zeros up to kBytes: the lanes of a row have a line of 128 bytes.
  template <int kHeadDim, int kBytes>
  __device__ __forceinline__ void copy_rows(const Sources& rows, unsigned to) const {
    constexpr int kLanes = 128 / kUnit, kAtATime = 32 / kLanes, kLines = (kBytes + 127) / 128;
    const int lane = own_lane(), byte = lane % kLanes * kUnit, first = lane / kLanes;
    to += first * 128 + ((byte / 16 ^ first) << 4) + byte % 16;
#pragma unroll 1
    for (int eight = begin_of(4 * kWords); eight < end_of(4 * kWords); ++eight) {
#pragma unroll
      for (int key = 0; key < 8; key += kAtATime) {
        const char* const row = row_of(rows, eight / 4, eight % 4 * 8 + key + first);
        const unsigned at = ((to + eight * 1024) ^ (key << 4)) + key * 128;
#pragma unroll
        for (int line = 0; line < kLines; ++line) {
          const int begin = 128 * line + byte, rest = 2 * kHeadDim - begin;
          if (128 * (line + 1) > kBytes && begin >= kBytes) break;
          if constexpr (2 * kHeadDim % kUnit == 0) {
            copy(at + line * Config::kKeys * 128, row + begin, row != nullptr && rest > 0);
          } else {  // the last one is read in part
            ptx::copy_async_cached<kUnit>(at + line * Config::kKeys * 128, row + begin,
                                   row == nullptr ? 0 : min(max(rest, 0), kUnit));
          }
        }
      }
    }
  }

  // K of an x-packed cache: pieces of 8 channels, a lane a key. A part is half a line of 128 bytes.
  __device__ __forceinline__ void copy_pieces(const Sources& rows, unsigned to) const {
    constexpr int kParts = (Config::kStepsQk + 1) / 2;  // of a row
    const long long outer = 2 * p_.k.outer_stride;
    const int lane = own_lane();
    to += lane * 128 + (lane % 8 << 4);
#pragma unroll 1
    for (int some = begin_of(kWords * kParts); some < end_of(kWords * kParts); ++some) {
      const int word = some / kParts, part = some % kParts;
      const char* from = row_of(rows, word);
      const bool there = from != nullptr;
      from += 4 * part * outer;
      const unsigned at = (to + word * 4096 + part / 2 * (Config::kKeys * 128)) ^ (part % 2 << 6);
#pragma unroll
      for (int piece = 0; piece < 4; ++piece, from += outer) {
#pragma unroll
        for (int byte = 0; byte < 16; byte += kUnit)
          copy((at ^ (piece << 4)) + byte, from + byte, there && 8 * (4 * part + piece) < Config::kHeadDimQk);
      }
    }
  }

  // V of an x-packed cache: a copy is a few keys of a channel. The lanes have 32 keys of a few channels at a time.
  __device__ __forceinline__ void copy_columns(const Sources& rows, unsigned to) const {
    constexpr int kKeysOfUnit = kUnit / 2, kAtATime = kKeysOfUnit, kParts = Config::kChannels / 32;
    const int lane = own_lane(), key = lane / kAtATime * kKeysOfUnit, first = lane % kAtATime;
    const long long inner = 2 * p_.v.inner_stride;
    to += key / 16 * (Config::kChannels * 32) + key % 8 * 2 + first * 32 + ((key / 8 ^ first / 4) % 2 << 4);
#pragma unroll 1
    for (int some = begin_of(kWords * kParts); some < end_of(kWords * kParts); ++some) {
      const int word = some / kParts, part = some % kParts;
      const char* from = row_of(rows, word, key);
      const bool there = from != nullptr;
      from += (32 * part + first) * inner;
      const unsigned at = to + word * (Config::kChannels * 64) + part * 1024;
#pragma unroll
      for (int channel = 0; channel < 32; channel += kAtATime, from += kAtATime * inner)
        copy((at + channel * 32) ^ (channel / 4 % 2 << 4), from,
             there && 32 * part + channel + first < Config::kHeadDimV);
    }
  }

  // --- What has come

  // Copies are handed over one tile of K or V late, when those of the next one are under way.
  __device__ __forceinline__ void hand_over_later(unsigned full) {
    ptx::commit_copies();
    if (pending_ != 0) {
      ptx::wait_copies<1>();
      hand_over(pending_);
    }
    pending_ = full;
  }
  __device__ __forceinline__ void hand_over_all() {
    ptx::wait_copies<0>();
    hand_over(pending_);
    pending_ = 0;
  }
  __device__ __forceinline__ void hand_over(unsigned full) const {
    ptx::fence_async_proxy();
    ptx::sync_some(kAllConverters, kThreads);
    if (thread() == 0 && full != 0) ptx::arrive(full);
  }

  __device__ __forceinline__ int thread() const { return 32 * warp_ + lane_; }

  const int warp_;
  const unsigned inverse_;  // of a page's size
  unsigned pending_ = 0;  // the barrier of what has been copied last
};

}  // namespace attune::prefill
