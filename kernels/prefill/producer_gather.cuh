// SPDX-License-Identifier: Apache-2.0
// The producer of caches that the TMA cannot copy: four warps gather rows by cp.async of 4, 8 or 16 bytes. They write
// the layout of the TMA and of the dequant warps: swizzled rows, and x-packed V as in xpacked.cuh. The first warp also
// takes work tiles, and copies q and the new tokens by TMA.
//
// A warp has 32 keys of a tile; in smaller tiles several warps have the same 32 keys. Each lane finds the row of one
// key. Keys that the block may not see, and keys on pages that do not exist, are not read; zeros are stored for them.
#pragma once

#include "prefill/producer.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/registers.cuh"

namespace attune::prefill {

class GatherProducer : Producer {
 public:
  __device__ __forceinline__ GatherProducer(const WorkTileParams& p, const Maps& maps, const Smem& smem)
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
      load(smem_.work(slot), head_tile, scheduler);
      __syncwarp();
      if (lane_ == 0) ptx::arrive(smem_.work_empty(slot_of(count)));
    }
    producer_commit_all();
  }

 private:
  static constexpr int kUnit = Config::kGather > 0 ? Config::kGather : 16;  // bytes of a cp.async
  static constexpr int kWarps = 4, kWords = Config::kKeys / 32, kWarpsPerGroup = kWarps / kWords;
  static_assert(!Config::kGathers || (kWarps == Config::kGatherWarps && kWarpsPerGroup * kWords == kWarps));

  // Recomputed at each use, so that it takes no register.
  __device__ __forceinline__ static int slot_of(unsigned count) {
    return static_cast<int>(ptx::opaque(count) % kernels::kWorkSlots);
  }

  // The page and slot of the lane's key, as read from the tables.
  struct Key {
    int page, slot;
  };

  template <class Scheduler>
  __device__ __forceinline__ void load(const WorkTile& work, int head_tile, Scheduler& scheduler) {
    const int kv_head = kv_head_of(head_tile);
    const Tiles tiles(work.num_cached, work.first_key, work.end_key);
    Key key = look_up(work, tile_at(work, tiles, work.tile_end - 1), false);
#pragma unroll 1
    for (int i = work.tile_end - 1; i >= work.tile_begin; --i) {
      const Tile tile = tile_at(work, tiles, i);
      const bool is_new = Config::kDense && !tile.cached;
      if (is_new) {
        load_new_k(work, kv_head, tile);
      } else {
        gather_k(work, tile, kv_head, key);
      }
      if (i == work.tile_end - 1 && warp_ == 0) {
        load_q_alone(work, head_tile);
        scheduler.next();
      }
      const char* row = nullptr;
      if (!is_new) {
        if (p_.v_page_table.data != nullptr) key = look_up(work, tile, true);
        row = row_pointer<Config::kXpacked ? kUnit / 2 : 1>(p_.v, kv_head, tile, key);
      }
      // The page for the next tile is requested as soon as this tile's page is no longer needed.
      if (i > work.tile_begin) key = look_up(work, tile_at(work, tiles, i - 1), false);
      if (is_new) {
        load_new_v(work, kv_head, tile);
      } else {
        gather_v(tile, row);
      }
      pipe_.next<Config::kStages>();
    }
  }

  // Loads new tokens by TMA. Each warp arrives once the stage is empty.
  __device__ __forceinline__ void load_new_k(const WorkTile& work, int kv_head, const Tile& tile) {
    producer_commit_all();  // nothing else would commit them before the consumer warps wait
    k_pipe_ = pipe_;
    if (warp_ == 0) return load_k(work, kv_head, tile, 0, 0);
    ptx::wait_phase(smem_.k_empty(pipe_.stage), pipe_.phase ^ 1);
    if (lane_ == 0) ptx::arrive(smem_.k_full(pipe_.stage));
  }
  __device__ __forceinline__ void load_new_v(const WorkTile& work, int kv_head, const Tile& tile) {
    v_pipe_ = pipe_;
    if (warp_ == 0) return load_v(work, kv_head, tile, 0);
    ptx::wait_phase(smem_.v_empty(pipe_.stage), pipe_.phase ^ 1);
    if (lane_ == 0) ptx::arrive(smem_.v_full(pipe_.stage));
  }

  __device__ __forceinline__ void gather_k(const WorkTile& work, const Tile& tile, int kv_head, const Key& key) {
    const char* const row = row_pointer<1>(p_.k, kv_head, tile, key);
    ptx::wait_phase(smem_.k_empty(pipe_.stage), pipe_.phase ^ 1);
    write_tile_mask(smem_.mask(pipe_.stage), work, tile, key);
    if constexpr (Config::kXpacked) {
      copy_xpacked_k(row, smem_.k(pipe_.stage));
    } else {
      copy_rows<Config::kHeadDimQk, 32 * Config::kQkSteps>(row, smem_.k(pipe_.stage));
    }
    producer_commit_previous(smem_.k_full(pipe_.stage));
  }

  __device__ __forceinline__ void gather_v(const Tile& tile, const char* row) {
    const unsigned to = smem_.v(pipe_.stage), full = smem_.v_full(pipe_.stage);
    ptx::wait_phase(smem_.v_empty(pipe_.stage), pipe_.phase ^ 1);
    if constexpr (Config::kXpacked) {
      copy_xpacked_v(row, to);
      if (tile.low != tile.start || tile.high != tile.start + Config::kKeys) {
        producer_commit_all();
        // racecheck reports the copies with the zeros: it does not model that each thread has waited for its copies.
        ptx::named_barrier_sync(kLoadBarrier, 32 * kWarps);  // the copies of all warps have arrived
        zero_v_columns<32 * kWarps>(to, tile.low - tile.start, tile.high - tile.start, 32 * warp_ + lane_);
        producer_commit(full);
        return;
      }
    } else {
      copy_rows<Config::kHeadDimV, 2 * Config::kChannels>(row, to);
    }
    producer_commit_previous(full);
  }

  // --- Rows of keys

  __device__ __forceinline__ int key_group() const { return warp_ / kWarpsPerGroup; }
  __device__ __forceinline__ int warp_in_group() const { return kWarpsPerGroup > 1 ? warp_ % kWarpsPerGroup : 0; }
  __device__ __forceinline__ int key_of(const Tile& tile) const { return tile.start + 32 * key_group() + lane_; }

  __device__ __forceinline__ Key look_up(const WorkTile& work, const Tile& tile, bool values) const {
    if (!tile.cached || tile.low >= tile.high) return {-1, 0};
    const int key = key_of(tile), seen = min(max(key, tile.low), tile.high - 1);
    if (!p_.paged) return {find_slot(p_, work.batch, seen, values).page, key};
    const kernels::IntTable& table = values && p_.v_page_table.data != nullptr ? p_.v_page_table : p_.page_table;
    return {int_at(table, work.batch, index_of(seen)), key - index_of(key) * p_.page_size};
  }
  // The index of a key's page. The quotient by the inverse is at most 1 too small.
  __device__ __forceinline__ int index_of(int key) const {
    const int index = static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(key)) * inverse_ >> 32);
    return index + (key - index * p_.page_size >= p_.page_size ? 1 : 0);
  }

  // The row of the lane's key, or null. kTogether: keys that one copy brings, some of which may be invisible.
  template <int kTogether>
  __device__ __forceinline__ const char* row_pointer(const kernels::KvPlane& plane, int kv_head, const Tile& tile,
                                                     const Key& key) const {
    const int first = key_of(tile) & -kTogether;
    const bool seen = first < tile.high && first + kTogether > tile.low && page_exists(p_, key.page);
    return seen ? plane.data + key.page * plane.page_stride + key.slot * plane.slot_stride + kv_head * plane.head_stride
                : nullptr;
  }

  // Writes the TileMask, of keys on pages that do not exist. Each warp has one byte of `any`. The stage is empty.
  __device__ __forceinline__ void write_tile_mask(unsigned at, const WorkTile& work, const Tile& tile,
                                                  const Key& key) const {
    const bool bad = key_of(tile) >= tile.low && key_of(tile) < tile.high &&
                     !(page_exists(p_, key.page) && has_value(p_, work.batch, key_of(tile)));
    const unsigned bits = __ballot_sync(0xffffffffu, bad);
    if (lane_ != 0) return;
    ptx::store_shared_u8(at + warp_, bits != 0 ? 1 : 0);
    ptx::store_shared_u32(at + 4 + 4 * key_group(), bits);
  }

  // --- Copies

  __device__ __forceinline__ static void copy(unsigned to, const char* from, bool there) {
    ptx::copy_async_cached<kUnit>(to, from, there ? kUnit : 0);
  }
  __device__ __forceinline__ static const char* row_of(const char* row, int lane) {
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), lane));
  }
  // The lane, opaque, so that addresses are recomputed at each use: registers are scarce.
  __device__ __forceinline__ int opaque_lane() const {
    return static_cast<int>(ptx::opaque(static_cast<unsigned>(lane_)));
  }

  // Copies rows of kHeadDim contiguous channels, then zeros up to kBytes. The lanes of a row have a line of 128 bytes.
  template <int kHeadDim, int kBytes>
  __device__ __forceinline__ void copy_rows(const char* own, unsigned to) const {
    constexpr int kLanes = 128 / kUnit, kAtATime = 32 / kLanes, kLines = (kBytes + 127) / 128;
    const int lane = opaque_lane(), byte = lane % kLanes * kUnit, first = lane / kLanes;
    to += key_group() * 4096 + first * 128 + ((byte / 16 ^ first) << 4) + byte % 16;
#pragma unroll 1
    for (int eight = warp_in_group(); eight < 4; eight += kWarpsPerGroup) {
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
          } else {  // the last copy reads fewer bytes
            ptx::copy_async_cached<kUnit>(at + line * Config::kKeys * 128, row + begin,
                                          row == nullptr ? 0 : min(max(rest, 0), kUnit));
          }
        }
      }
    }
  }

  // Copies x-packed K: units of 8 channels, one key for each lane.
  __device__ __forceinline__ void copy_xpacked_k(const char* from, unsigned to) const {
    constexpr int kChunks = 2 * Config::kQkSteps;
    const int lane = opaque_lane();
    const long long outer = 2 * p_.k.outer_stride;
    const bool there = from != nullptr;
    to += key_group() * 4096 + lane * 128 + (lane % 8 << 4);
    from += warp_in_group() * outer;
#pragma unroll(kUnit)
    for (int begin = 0; begin < kChunks; begin += kWarpsPerGroup, from += kWarpsPerGroup * outer) {
      const int chunk = begin + warp_in_group();
      if (kChunks % kWarpsPerGroup != 0 && chunk >= kChunks) break;
#pragma unroll
      for (int byte = 0; byte < 16; byte += kUnit)
        copy((to ^ (chunk % 8 << 4)) + chunk / 8 * (Config::kKeys * 128) + byte, from + byte,
             there && 8 * chunk < Config::kHeadDimQk);
    }
  }

  // Copies x-packed V: one copy has a few keys of a channel. The lanes have all keys of a few channels at a time.
  __device__ __forceinline__ void copy_xpacked_v(const char* own, unsigned to) const {
    constexpr int kKeysOfUnit = kUnit / 2, kAtATime = kKeysOfUnit, kStep = kWarpsPerGroup * kAtATime;
    const int lane = opaque_lane(), key = lane / kAtATime * kKeysOfUnit,
              first = warp_in_group() * kAtATime + lane % kAtATime;
    const long long inner = 2 * p_.v.inner_stride;
    const char* from = row_of(own, key);
    const bool there = from != nullptr;
    from += first * inner;
    to += (2 * key_group() + key / 16) * (Config::kChannels * 32) + key % 8 * 2 + first * 32 +
          ((key / 8 ^ first / 4) % 2 << 4);
    static_assert(Config::kChannels % kStep == 0 && (kStep % 8 == 0 || kStep <= 4));  // the swizzle repeats
#pragma unroll(16)
    for (int channel = 0; channel < Config::kChannels; channel += kStep, from += kStep * inner)
      copy((to + channel * 32) ^ (channel / 4 % 2 << 4), from, there && channel + first < Config::kHeadDimV);
  }

  // --- Commits

  // A tile of K or V is committed once the copies of the next tile have been issued.
  __device__ __forceinline__ void producer_commit_previous(unsigned full) {
    ptx::commit_copies();
    if (pending_ != 0) {
      ptx::wait_copies<1>();
      producer_commit(pending_);
    }
    pending_ = full;
  }
  __device__ __forceinline__ void producer_commit_all() {
    ptx::commit_copies();
    ptx::wait_copies<0>();
    if (pending_ != 0) producer_commit(pending_);
    pending_ = 0;
  }
  // Called by each warp.
  __device__ __forceinline__ void producer_commit(unsigned full) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) ptx::arrive(full);
  }

  const int warp_;
  const unsigned inverse_;  // of the page size
  PipelineState pipe_;      // K and V advance together
  unsigned pending_ = 0;    // the full barrier of the latest copies
};

}  // namespace attune::prefill
