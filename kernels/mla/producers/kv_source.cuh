// SPDX-License-Identifier: Apache-2.0
// Finds the rows of keys, for threads that copy them one by one: in slots of a list, in pages of a page table, or
// dense.
#pragma once

#include "mla/problem.cuh"

namespace attune::mla {

// The rows of one tile.
class KvSource {
 public:
  __device__ __forceinline__ KvSource(const WorkTileParams& p, const WorkTile& t, int kv_head, const Tile& tile)
      : p_(p), tile_(tile), pool_(p.pools[is_dense(p, tile) || (ProblemConfig::kSparse && !tile.cached) ? 1 : 0]) {
    data_ = pool_.data + kv_head * pool_.head_stride;
    limit_ = pool_.num_slots;
    if (is_dense(p, tile)) {
      data_ += t.batch * pool_.batch_stride + t.kv_row * pool_.slot_stride;
      limit_ = t.num_keys;
    }
    if constexpr (ProblemConfig::kSparse) {
      const kernels::SlotList& list = tile.cached ? p.list_of_slots : p.list_of_extra;
      table_ = scheduler::entries_of(list, t, kv_head);
      step_ = list.entry_stride;
      offset_ = tile.cached ? 0 : t.num_cached;
    } else {
      offset_ = t.num_cached;  // of dense rows
      if (p.paged) {
        table_ = p.page_table.data + t.batch * p.page_table.row_stride;
        step_ = p.page_table.column_stride;
      } else {
        only_page_ = p.batch_index.data != nullptr ? common::int_at(p.batch_index, t.batch) : t.batch;
      }
    }
  }

  // Loads the entry of the list or page table for a key, so that it can be prefetched. -1: the key is not read.
  __device__ __forceinline__ int load_index(int key) const {
    if (key < tile_.low || key >= tile_.high) return -1;
    if constexpr (ProblemConfig::kSparse) return table_[(key - offset_) * step_];
    if (is_dense(p_, tile_)) return key - offset_;
    return p_.paged ? table_[page_of(pool_, key) * step_] : only_page_;
  }

  // The address of a key's row; null if its entry or page is out of range. index: from load_index().
  __device__ __forceinline__ const char* locate(int key, int index) const {
    if (ProblemConfig::kSparse || is_dense(p_, tile_)) {
      if (static_cast<unsigned>(index) >= static_cast<unsigned>(limit_)) return nullptr;
      const int page = page_of(pool_, index);
      return data_ + page * pool_.page_stride + (index - page * pool_.page_size) * pool_.slot_stride;
    }
    if (!common::page_exists(p_, index)) return nullptr;
    return data_ + index * pool_.page_stride + slot_of(key) * pool_.slot_stride;
  }

  // The offset of the scales from a packed row: within the row (656), or in a plane after the page's rows (584).
  __device__ __forceinline__ int scales_of(int key, int index) const {
    if constexpr (ProblemConfig::kProducer != kernels::kMlaDequant584) return Packed::kNope;
    const int slot = ProblemConfig::kSparse ? index - page_of(pool_, index) * pool_.page_size : slot_of(key);
    return pool_.page_size * Packed::kRowBytes + slot * (8 - Packed::kRowBytes);
  }

 private:
  __device__ __forceinline__ static bool is_dense(const WorkTileParams& p, const Tile& tile) {
    return ProblemConfig::kDense && (ProblemConfig::kSparse || !tile.cached);
  }
  __device__ __forceinline__ int slot_of(int key) const { return key - page_of(pool_, key) * pool_.page_size; }

  const WorkTileParams& p_;
  const Tile& tile_;
  const kernels::RowPool& pool_;
  const char* data_;
  const int* table_ = nullptr;
  long long step_ = 0;
  int limit_, offset_ = 0, only_page_ = -1;
};

// One channel of a key's row, dequantized. index: from load_index().
__device__ __forceinline__ float load_channel(const KvSource& source, int key, int index, const char* row,
                                              bool quantized, int channel) {
  if (!quantized) return common::load_element(ProblemConfig::kType, row, channel);
  if (channel >= Packed::kNope)
    return common::load_element(common::kBFloat16, row + Packed::kRope, channel - Packed::kNope);
  const char* const scales = row + source.scales_of(key, index);
  const float scale = Packed::load_scale(scales, channel / Packed::kGroup, true);
  return ptx::bf16_to_float(
      static_cast<unsigned short>(ptx::pack_bf16(common::load_element(common::kE4m3, row, channel) * scale, 0.0f)));
}

}  // namespace attune::mla
