// SPDX-License-Identifier: Apache-2.0
// Four warps that bring all there is where the TMA does not take the cache's rows. They copy the cache asynchronously,
// by 4, 8 or 16 bytes, to where the TMA or the converters would have put it: rows, swizzled, and V of an x-packed cache
// as xpacked.cuh has it. The first of them takes work tiles, and has the TMA copy q, and new tokens beside the cache.
//
// A warp has 32 keys of a tile, or shares them with others where a tile has fewer; a lane knows where one of them lies.
// What nobody may see, and what is on pages that are not there, is not read, and becomes zero.
#pragma once

#include "prefill/producer.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/registers.cuh"

namespace attune::prefill {

class GatherProducer : Producer {
 public:
  __device__ __forceinline__ GatherProducer(const PrefillParams& p, const Maps& maps, const Smem& smem)
      : Producer(p, maps, smem),
        warp_(static_cast<int>(threadIdx.x) / 32),
        inverse_(p.paged ? 0xffffffffu / static_cast<unsigned>(p.page_size) : 0) {}

  __device__ __forceinline__ void run() {
    TileScheduler<Smem, 1, Config::kCached> scheduler(p_, smem_);
    if (warp_ == 0) scheduler.next();
    for (unsigned count = 0;; ++count) {
      const int slot = slot_of(count);
      ptx::wait_phase(smem_.work_full(slot), count / kernels::kWorkSlots % 2);
      const int head_tile = smem_.head_tile(slot);
      if (head_tile == kNoMoreWork) break;
      gather(smem_.work(slot), head_tile, scheduler);
      __syncwarp();
      if (lane_ == 0) ptx::arrive(smem_.work_empty(slot_of(count)));
    }
    hand_over_all();
  }

 private:
  static constexpr int kUnit = Config::kGather > 0 ? Config::kGather : 16;  // bytes of a copy
  static constexpr int kWarps = 4, kWords = Config::kKeys / 32, kShares = kWarps / kWords;
  static_assert(!Config::kGathers || (kWarps == Config::kGatherWarps && kShares * kWords == kWarps));

  // Computed anew, to be kept by nobody.
  __device__ __forceinline__ static int slot_of(unsigned count) {
    return static_cast<int>(ptx::kept(count) % kernels::kWorkSlots);
  }

  // Of the lane's key: its page, as the tables say, and its place in it.
  struct Key {
    int page, slot;
  };

  template <class Scheduler>
  __device__ __forceinline__ void gather(const WorkTile& work, int head_tile, Scheduler& scheduler) {
    const int kv_head = kv_head_of(head_tile);
    const Line line(work.num_cached, work.first_key, work.end_key);
    Key key = ask(work, tile_at(work, line, work.tile_end - 1), false);
#pragma unroll 1
    for (int i = work.tile_end - 1; i >= work.tile_begin; --i) {
      const Tile tile = tile_at(work, line, i);
      const bool is_new = Config::kDense && !tile.cached;
      if (is_new) {
        new_keys(work, kv_head, tile);
      } else {
        keys(work, tile, kv_head, key);
      }
      if (i == work.tile_end - 1 && warp_ == 0) {
        load_queries_alone(work, head_tile);
        scheduler.next();
      }
      const char* row = nullptr;
      if (!is_new) {
        if (p_.v_page_table.data != nullptr) key = ask(work, tile, true);
        row = find<Config::kXpacked ? kUnit / 2 : 1>(p_.v, kv_head, tile, key);
      }
      // The table is asked for the next tile's page when it is needed for this one no more.
      if (i > work.tile_begin) key = ask(work, tile_at(work, line, i - 1), false);
      if (is_new) {
        new_values(work, kv_head, tile);
      } else {
        values(tile, row);
      }
      pipe_.next<Config::kStages>();
    }
  }

  // Of new tokens. Each warp arrives, when the stage is its own.
  __device__ __forceinline__ void new_keys(const WorkTile& work, int kv_head, const Tile& tile) {
    hand_over_all();  // nothing else would before these are needed
    k_pipe_ = pipe_;
    if (warp_ == 0) return load_keys(work, kv_head, tile, 0, 0);
    ptx::wait_phase(smem_.k_empty(pipe_.stage), pipe_.phase ^ 1);
    if (lane_ == 0) ptx::arrive(smem_.k_full(pipe_.stage));
  }
  __device__ __forceinline__ void new_values(const WorkTile& work, int kv_head, const Tile& tile) {
    v_pipe_ = pipe_;
    if (warp_ == 0) return load_values(work, kv_head, tile, 0);
    ptx::wait_phase(smem_.v_empty(pipe_.stage), pipe_.phase ^ 1);
    if (lane_ == 0) ptx::arrive(smem_.v_full(pipe_.stage));
  }

  __device__ __forceinline__ void keys(const WorkTile& work, const Tile& tile, int kv_head, const Key& key) {
    const char* const row = find<1>(p_.k, kv_head, tile, key);
    ptx::wait_phase(smem_.k_empty(pipe_.stage), pipe_.phase ^ 1);
    note_hidden(smem_.mask(pipe_.stage), work, tile, key);
    if constexpr (Config::kXpacked) {
      copy_pieces(row, smem_.k(pipe_.stage));
    } else {
      copy_rows<Config::kHeadDimQk, 32 * Config::kStepsQk>(row, smem_.k(pipe_.stage));
    }
    hand_over_later(smem_.k_full(pipe_.stage));
  }

  __device__ __forceinline__ void values(const Tile& tile, const char* row) {
    const unsigned to = smem_.v(pipe_.stage), full = smem_.v_full(pipe_.stage);
    ptx::wait_phase(smem_.v_empty(pipe_.stage), pipe_.phase ^ 1);
    if constexpr (Config::kXpacked) {
      copy_columns(row, to);
      if (tile.low != tile.start || tile.high != tile.start + Config::kKeys) {
        hand_over_all();
        // racecheck reports the copies beside the zeros: it does not follow that each thread has waited for its own.
        ptx::sync_some(kLoadBarrier, 32 * kWarps);  // what others have copied is there
        clear_columns<32 * kWarps>(to, tile.low - tile.start, tile.high - tile.start, 32 * warp_ + lane_);
        hand_over(full);
        return;
      }
    } else {
      copy_rows<Config::kHeadDimV, 2 * Config::kChannels>(row, to);
    }
    hand_over_later(full);
  }

  // --- Where keys lie

  __device__ __forceinline__ int word() const { return warp_ / kShares; }
  __device__ __forceinline__ int share() const { return kShares > 1 ? warp_ % kShares : 0; }
  __device__ __forceinline__ int key_of(const Tile& tile) const { return tile.start + 32 * word() + lane_; }

  __device__ __forceinline__ Key ask(const WorkTile& work, const Tile& tile, bool values) const {
    if (!tile.cached || tile.low >= tile.high) return {-1, 0};
    const int key = key_of(tile), seen = min(max(key, tile.low), tile.high - 1);
    if (!p_.paged) return {find_slot(p_, work.batch, seen, values).page, key};
    const kernels::IntTable& table = values && p_.v_page_table.data != nullptr ? p_.v_page_table : p_.page_table;
    return {int_at(table, work.batch, index_of(seen)), key - index_of(key) * p_.page_size};
  }
  // Of a page: the quotient as the inverse says it is at most 1 too small.
  __device__ __forceinline__ int index_of(int key) const {
    const int index = static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(key)) * inverse_ >> 32);
    return index + (key - index * p_.page_size >= p_.page_size ? 1 : 0);
  }

  // The row of the lane's key, or null. kTogether: keys that come in one copy, of which some may be hidden.
  template <int kTogether>
  __device__ __forceinline__ const char* find(const kernels::KvPlane& plane, int kv_head, const Tile& tile,
                                              const Key& key) const {
    const int first = key_of(tile) & -kTogether;
    const bool seen = first < tile.high && first + kTogether > tile.low && is_there(p_, key.page);
    return seen ? plane.data + key.page * plane.page_stride + key.slot * plane.slot_stride +
                      kv_head * plane.head_stride
                : nullptr;
  }

  // Tells the math warps which keys lie on pages that are not there. A byte of the flag is a warp's. The stage is free.
  __device__ __forceinline__ void note_hidden(unsigned at, const WorkTile& work, const Tile& tile,
                                              const Key& key) const {
    const bool bad = key_of(tile) >= tile.low && key_of(tile) < tile.high &&
                     !(is_there(p_, key.page) && has_value(p_, work.batch, key_of(tile)));
    const unsigned bits = __ballot_sync(0xffffffffu, bad);
    if (lane_ != 0) return;
    ptx::store_shared_u8(at + warp_, bits != 0 ? 1 : 0);
    ptx::store_shared_u32(at + 4 + 4 * word(), bits);
  }

  // --- Copies

  __device__ __forceinline__ static void copy(unsigned to, const char* from, bool there) {
    ptx::copy_async_cached<kUnit>(to, from, there ? kUnit : 0);
  }
  __device__ __forceinline__ static const char* row_of(const char* row, int lane) {
    return reinterpret_cast<const char*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), lane));
  }
  // What comes of it is computed where it is needed: registers are scarce.
  __device__ __forceinline__ int own_lane() const {
    return static_cast<int>(ptx::kept(static_cast<unsigned>(lane_)));
  }

  // Rows of kHeadDim channels side by side, zeros up to kBytes: the lanes of a row have a line of 128 bytes.
  template <int kHeadDim, int kBytes>
  __device__ __forceinline__ void copy_rows(const char* own, unsigned to) const {
    constexpr int kLanes = 128 / kUnit, kAtATime = 32 / kLanes, kLines = (kBytes + 127) / 128;
    const int lane = own_lane(), byte = lane % kLanes * kUnit, first = lane / kLanes;
    to += word() * 4096 + first * 128 + ((byte / 16 ^ first) << 4) + byte % 16;
#pragma unroll 1
    for (int eight = share(); eight < 4; eight += kShares) {
#pragma unroll
      for (int key = 0; key < 8; key += kAtATime) {
        const char* const row = row_of(own, eight * 8 + key + first);
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

  // K of an x-packed cache: pieces of 8 channels, a lane a key.
  __device__ __forceinline__ void copy_pieces(const char* from, unsigned to) const {
    constexpr int kPieces = 2 * Config::kStepsQk;
    const int lane = own_lane();
    const long long outer = 2 * p_.k.outer_stride;
    const bool there = from != nullptr;
    to += word() * 4096 + lane * 128 + (lane % 8 << 4);
    from += share() * outer;
#pragma unroll(kUnit)
    for (int begin = 0; begin < kPieces; begin += kShares, from += kShares * outer) {
      const int piece = begin + share();
      if (kPieces % kShares != 0 && piece >= kPieces) break;
#pragma unroll
      for (int byte = 0; byte < 16; byte += kUnit)
        copy((to ^ (piece % 8 << 4)) + piece / 8 * (Config::kKeys * 128) + byte, from + byte,
             there && 8 * piece < Config::kHeadDimQk);
    }
  }

  // V of an x-packed cache: a copy is a few keys of a channel. The lanes have all keys of a few channels at a time.
  __device__ __forceinline__ void copy_columns(const char* own, unsigned to) const {
    constexpr int kKeysOfUnit = kUnit / 2, kAtATime = kKeysOfUnit, kStep = kShares * kAtATime;
    const int lane = own_lane(), key = lane / kAtATime * kKeysOfUnit, first = share() * kAtATime + lane % kAtATime;
    const long long inner = 2 * p_.v.inner_stride;
    const char* from = row_of(own, key);
    const bool there = from != nullptr;
    from += first * inner;
    to += (2 * word() + key / 16) * (Config::kChannels * 32) + key % 8 * 2 + first * 32 +
          ((key / 8 ^ first / 4) % 2 << 4);
    static_assert(Config::kChannels % kStep == 0 && (kStep % 8 == 0 || kStep <= 4));  // of the swizzling
#pragma unroll(16)
    for (int channel = 0; channel < Config::kChannels; channel += kStep, from += kStep * inner)
      copy((to + channel * 32) ^ (channel / 4 % 2 << 4), from, there && channel + first < Config::kHeadDimV);
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
    ptx::commit_copies();
    ptx::wait_copies<0>();
    if (pending_ != 0) hand_over(pending_);
    pending_ = 0;
  }
  // By each warp.
  __device__ __forceinline__ void hand_over(unsigned full) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) ptx::arrive(full);
  }

  const int warp_;
  const unsigned inverse_;  // of a page's size
  PipelineState pipe_;               // of K and of V
  unsigned pending_ = 0;    // the barrier of what has been copied last
};

}  // namespace attune::prefill
