// SPDX-License-Identifier: Apache-2.0
// A thread's part of a block of keys: rows lane / 4 and lane / 4 + 8 of its warp's 16 in each tile of 64, and of those
// 16 channels of each 64 (queries.cuh). It asks for them kKeyStages units ahead, to places in shared memory that are
// its own, so no other thread waits; pages are looked up one unit before that. The four lanes of a quad have the same
// keys: each looks one up and writes its score.
#pragma once

#include "indexer/scores_config.cuh"

namespace attune::indexer {

class Keys {
 public:
  static constexpr int kType = Config::kKeyType, kSize = tile::element_size(kType);
  static constexpr int kRowsOfThread = 2 * Config::kTiles;

  __device__ __forceinline__ Keys(const IndexScoresParams& p, SharedStorage& shared)
      : p_(p), shared_(shared), thread_(static_cast<int>(threadIdx.x) - 128), first_channel_(threadIdx.x % 4 * 16) {}

  // Key r of the thread, counted from the block's first: tile r / 2, upper or lower half r % 2.
  __device__ __forceinline__ int key_of(int r) const {
    return thread_ / 128 * (64 * Config::kTiles) + r / 2 * 64 + thread_ % 128 / 32 * 16 + thread_ % 32 / 4 + r % 2 * 8;
  }
  // The one of the quad's keys whose score this lane writes.
  __device__ __forceinline__ int own() const { return thread_ % kRowsOfThread; }

  // Before the first unit.
  __device__ __forceinline__ void start() {
    if constexpr (Config::kKeyStages > 0) {
#pragma unroll
      for (int i = 0; i < Config::kKeyStages; ++i) {
        look_up_next();
        ask();
      }
      look_up_next();
    }
  }

  // The unit's keys as fragments of products, tile by tile; then asks for those of a unit to come.
  __device__ __forceinline__ void take(const Unit& unit, unsigned (&a)[Config::kTiles][4 * Config::kSteps]) {
    if constexpr (Config::kKeyStages > 0) {
      ptx::wait_copies<Config::kKeyStages - 1>();
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r) {
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c) {
          Raw<kType> raw;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            const uint4 x = shared_.keys[taken_.stage][piece(r, c, i)];
            raw.word[4 * i] = x.x, raw.word[4 * i + 1] = x.y, raw.word[4 * i + 2] = x.z, raw.word[4 * i + 3] = x.w;
          }
          place(raw, r, c, a);
        }
      }
      scale_ = shared_.key_scale[taken_.stage][thread_];
      hidden_ = shared_.key_hidden[taken_.stage][thread_] != 0;
      if (p_.rows.cache.k_scale.mode == 0) scale_ = 1;
      taken_.next();
      __syncwarp();  // the pieces have been read
      ask();
      look_up_next();
    } else {
      read(unit, a);
    }
  }

  // Of the key that this lane writes.
  __device__ __forceinline__ float scale() const { return scale_; }
  __device__ __forceinline__ bool hidden() const { return hidden_; }

 private:
  __device__ __forceinline__ int piece(int r, int c, int i) const {
    return ((r * Config::kPanels + c) * kSize + i) * Config::kMathThreads + thread_;
  }
  __device__ __forceinline__ static void place(const Raw<kType>& raw, int r, int c,
                                               unsigned (&a)[Config::kTiles][4 * Config::kSteps]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) a[r / 2][(4 * c + i / 2) * 4 + i % 2 * 2 + r % 2] = raw.pair(i);
  }

  // Page -2: no such key.
  __device__ __forceinline__ Slot look_up(int sequence, int keys, int t) const {
    return t < keys ? find_slot(p_.rows, sequence, t) : Slot{-2, 0};
  }
  __device__ __forceinline__ const char* row_at(const Slot& s) const {
    return p_.rows.cache.k.data + s.page * p_.rows.cache.k.page_stride + s.offset * p_.rows.cache.k.slot_stride;
  }
  __device__ __forceinline__ const char* scale_at(const Slot& s) const {
    const kernels::RowScale& t = p_.rows.cache.k_scale;
    return t.data + s.page * t.page_stride + s.offset * t.slot_stride;
  }

  // Key r of the quad, from the lane that looked it up.
  __device__ __forceinline__ static Slot slot_of(const Slot& own, int r) {
    const int lane = static_cast<int>(threadIdx.x % 32 & ~3u) + r;
    return {__shfl_sync(0xffffffffu, own.page, lane), __shfl_sync(0xffffffffu, own.offset, lane)};
  }

  // Where the quad's keys of the next unit to be asked for are.
  __device__ __forceinline__ void look_up_next() {
    if (!more_) return;
    ptx::wait_phase(address(shared_.unit_full[ahead_.stage]), ahead_.parity);
    const Unit& unit = shared_.units[ahead_.stage];
    more_ = unit.mask != 0;
    if (!more_) return;
    const int sequence = unit.sequence, keys = unit.keys, key = unit.key;
    next_ = look_up(sequence, keys, key + key_of(own()));
    ahead_.next();
  }

  __device__ __forceinline__ void ask() {
    if (more_) {
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r) {
        const Slot slot = slot_of(next_, r);
        const bool there = slot.page >= 0;
        const char* const from = there ? row_at(slot) : p_.rows.cache.k.data;
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c) {
          const int channel = 64 * c + first_channel_;
          const bool read = there && channel < p_.head_dim;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            ptx::copy_async<16>(ptx::shared_address(&shared_.keys[asked_.stage][piece(r, c, i)]),
                                read ? from + channel * kSize + 16 * i : from, read ? 16 : 0);
          }
        }
      }
      shared_.key_hidden[asked_.stage][thread_] = next_.page == -1;
      if (next_.page >= 0 && p_.rows.cache.k_scale.mode != 0)
        ptx::copy_async<4>(ptx::shared_address(&shared_.key_scale[asked_.stage][thread_]), scale_at(next_), 4);
    }
    ptx::commit_copies();
    asked_.next();
  }

  // Element by element, whatever the layout.
  __device__ __forceinline__ void read(const Unit& unit, unsigned (&a)[Config::kTiles][4 * Config::kSteps]) {
    const kernels::RowPlane& plane = p_.rows.cache.k;
    const Slot own_slot = look_up(unit.sequence, unit.keys, unit.key + key_of(own()));
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      const Slot slot = slot_of(own_slot, r);
      const char* const from = slot.page >= 0 ? row_at(slot) : nullptr;
#pragma unroll
      for (int c = 0; c < Config::kPanels; ++c) {
        const int channel = 64 * c + first_channel_, count = from == nullptr ? 0 : min(16, p_.head_dim - channel);
        Raw<kType> raw = Raw<kType>::elements(count, [&](int i) {
          const int pack = divide(channel + i, p_.pack);
          return from + pack * plane.outer_stride + (channel + i - pack * plane.pack) * plane.inner_stride;
        });
        ptx::pin(raw.word);  // not all elements on their way at a time
        place(raw, r, c, a);
      }
    }
    hidden_ = own_slot.page == -1;
    scale_ = own_slot.page >= 0 && p_.rows.cache.k_scale.mode != 0 ? *reinterpret_cast<const float*>(scale_at(own_slot))
                                                                    : 1.0f;
  }

  const IndexScoresParams& p_;
  SharedStorage& shared_;
  const int thread_, first_channel_;
  bool more_ = true, hidden_ = false;
  float scale_ = 1;
  Slot next_{-2, 0};
  Turn<Config::kUnits> ahead_;
  Turn<Config::kKeySlots> asked_, taken_;
};

}  // namespace attune::indexer
