// SPDX-License-Identifier: Apache-2.0
// Loads keys as A fragments of wgmma, in registers. In each tile of 64 keys a thread has rows lane / 4 and lane / 4 + 8
// of its warp's 16, and 16 of each 64 channels of those (producer.cuh). It copies them kKeyStages work tiles ahead to
// chunks of shared memory that no other thread uses, so keys need no barrier. Pages are looked up one work tile
// earlier. The four lanes of a quad have the same keys; each lane looks up one of them and writes its score.
#pragma once

#include "indexer/scores_config.cuh"

namespace attune::indexer {

class Keys {
 public:
  static constexpr int kType = Config::kKeyType, kSize = common::element_size(kType);
  static constexpr int kRowsOfThread = 2 * Config::kTiles;

  __device__ __forceinline__ Keys(const IndexScoresParams& p, SharedStorage& shared)
      : p_(p), shared_(shared), thread_(static_cast<int>(threadIdx.x) - 128), first_channel_(threadIdx.x % 4 * 16) {}

  // The thread's key r, counted from the block's first key: tile r / 2, half r % 2.
  __device__ __forceinline__ int key_of(int r) const {
    return thread_ / 128 * (64 * Config::kTiles) + r / 2 * 64 + thread_ % 128 / 32 * 16 + thread_ % 32 / 4 + r % 2 * 8;
  }
  // The r of the key whose score this lane writes.
  __device__ __forceinline__ int own_key() const { return thread_ % kRowsOfThread; }

  // The prologue of the pipeline, before the first work tile.
  __device__ __forceinline__ void start() {
    if constexpr (Config::kKeyStages > 0) {
#pragma unroll
      for (int i = 0; i < Config::kKeyStages; ++i) {
        look_up_next_slot();
        issue_copies();
      }
      look_up_next_slot();
    }
  }

  // Loads the A fragments of a work tile's keys, then issues the copies of a later work tile.
  __device__ __forceinline__ void load_fragments(const WorkTile& work,
                                                 unsigned (&a)[Config::kTiles][4 * Config::kSteps]) {
    if constexpr (Config::kKeyStages > 0) {
      ptx::wait_copies<Config::kKeyStages - 1>();
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r) {
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c) {
          Raw<kType> raw;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            const uint4 x = shared_.keys[read_pipe_.stage][chunk_at(r, c, i)];
            raw.word[4 * i] = x.x, raw.word[4 * i + 1] = x.y, raw.word[4 * i + 2] = x.z, raw.word[4 * i + 3] = x.w;
          }
          to_fragment(raw, r, c, a);
        }
      }
      scale_ = shared_.key_scale[read_pipe_.stage][thread_];
      masked_ = shared_.key_masked[read_pipe_.stage][thread_] != 0;
      if (p_.rows.cache.k_scale.mode == ScaleMode::kNone) scale_ = 1;
      read_pipe_.next<Config::kKeySlots>();
      __syncwarp();  // all lanes have read the stage
      issue_copies();
      look_up_next_slot();
    } else {
      read(work, a);
    }
  }

  // The scale of the key whose score this lane writes.
  __device__ __forceinline__ float scale() const { return scale_; }
  __device__ __forceinline__ bool masked() const { return masked_; }

 private:
  __device__ __forceinline__ int chunk_at(int r, int c, int i) const {
    return ((r * Config::kPanels + c) * kSize + i) * Config::kConsumerThreads + thread_;
  }
  __device__ __forceinline__ static void to_fragment(const Raw<kType>& raw, int r, int c,
                                                     unsigned (&a)[Config::kTiles][4 * Config::kSteps]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) a[r / 2][(4 * c + i / 2) * 4 + i % 2 * 2 + r % 2] = raw.pair(i);
  }

  // page -2: there is no such key.
  __device__ __forceinline__ Slot look_up(int sequence, int keys, int t) const {
    return t < keys ? find_slot(p_.rows, sequence, t) : Slot{-2, 0};
  }
  __device__ __forceinline__ const char* row_at(const Slot& s) const {
    return p_.rows.cache.k.data + s.page * p_.rows.cache.k.page_stride + s.offset * p_.rows.cache.k.slot_stride;
  }
  __device__ __forceinline__ const char* scale_at(const Slot& s) const {
    return reinterpret_cast<const char*>(p_.rows.cache.k_scale.at(s.page, s.offset, 0));
  }

  // Slot of the quad's key r, from the lane that looked it up.
  __device__ __forceinline__ static Slot slot_of(const Slot& own, int r) {
    const int lane = static_cast<int>(threadIdx.x % 32 & ~3u) + r;
    return {__shfl_sync(0xffffffffu, own.page, lane), __shfl_sync(0xffffffffu, own.offset, lane)};
  }

  // Looks up the slots of the quad's keys in the next work tile that will be copied.
  __device__ __forceinline__ void look_up_next_slot() {
    if (!more_) return;
    ptx::wait_phase(address(shared_.work_full[work_pipe_.stage]), work_pipe_.phase);
    const WorkTile& work = shared_.work_tiles[work_pipe_.stage];
    more_ = work.mask != 0;
    if (!more_) return;
    const int sequence = work.sequence, keys = work.keys, key = work.key;
    next_ = look_up(sequence, keys, key + key_of(own_key()));
    work_pipe_.next<Config::kWorkSlots>();
  }

  __device__ __forceinline__ void issue_copies() {
    if (more_) {
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r) {
        const Slot slot = slot_of(next_, r);
        const bool exists = slot.page >= 0;
        const char* const from = exists ? row_at(slot) : p_.rows.cache.k.data;
#pragma unroll
        for (int c = 0; c < Config::kPanels; ++c) {
          const int channel = 64 * c + first_channel_;
          const bool read = exists && channel < p_.head_dim;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            ptx::copy_async<16>(ptx::shared_address(&shared_.keys[copy_pipe_.stage][chunk_at(r, c, i)]),
                                read ? from + channel * kSize + 16 * i : from, read ? 16 : 0);
          }
        }
      }
      shared_.key_masked[copy_pipe_.stage][thread_] = next_.page == -1;
      if (next_.page >= 0 && p_.rows.cache.k_scale.mode != ScaleMode::kNone)
        ptx::copy_async<4>(ptx::shared_address(&shared_.key_scale[copy_pipe_.stage][thread_]), scale_at(next_), 4);
    }
    ptx::commit_copies();
    copy_pipe_.next<Config::kKeySlots>();
  }

  // Loads the fragments element by element; works for any layout.
  __device__ __forceinline__ void read(const WorkTile& work, unsigned (&a)[Config::kTiles][4 * Config::kSteps]) {
    const kernels::KvPlane& plane = p_.rows.cache.k;
    const Slot own_slot = look_up(work.sequence, work.keys, work.key + key_of(own_key()));
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      const Slot slot = slot_of(own_slot, r);
      const char* const from = slot.page >= 0 ? row_at(slot) : nullptr;
#pragma unroll
      for (int c = 0; c < Config::kPanels; ++c) {
        const int channel = 64 * c + first_channel_, count = from == nullptr ? 0 : min(16, p_.head_dim - channel);
        Raw<kType> raw = Raw<kType>::elements(count, [&](int i) {
          const int pack = divide(channel + i, p_.pack);
          return from + kSize * (pack * plane.outer_stride + (channel + i - pack * plane.pack) * plane.inner_stride);
        });
        ptx::fence_operand(raw.word);  // fewer elements in flight need fewer registers
        to_fragment(raw, r, c, a);
      }
    }
    masked_ = own_slot.page == -1;
    const bool has_scale = own_slot.page >= 0 && p_.rows.cache.k_scale.mode != ScaleMode::kNone;
    scale_ = has_scale ? *reinterpret_cast<const float*>(scale_at(own_slot)) : 1.0f;
  }

  const IndexScoresParams& p_;
  SharedStorage& shared_;
  const int thread_, first_channel_;
  bool more_ = true, masked_ = false;
  float scale_ = 1;
  Slot next_{-2, 0};
  common::PipelineState work_pipe_, copy_pipe_, read_pipe_;
};

}  // namespace attune::indexer
