// SPDX-License-Identifier: Apache-2.0
// Finds the cached rows of a work tile. It does what KvSource does (mla/producers/kv_source.cuh) with less arithmetic:
// otherwise address computation would take a third of the time of the dequantization. It keeps nothing from tile to
// tile, because registers are scarce.
#pragma once

#include "mla/config.cuh"

namespace attune::mla {

class CachedSource {
 public:
  __device__ __forceinline__ CachedSource(const WorkTileParams& p, const WorkTile& work, int head_tile)
      : p_(p), t_(work), kv_head_(head_tile * p.heads_of_tile / p.group) {}

  // Loads the entry of the list or page table for row `row` of tile i, so that it can be prefetched. -1: the row is not
  // read.
  __device__ __forceinline__ int load_index(int i, int row) const {
    if constexpr (Config::kSparse) {
      const bool extra = is_extra(i);
      const kernels::SlotList& list = extra ? p_.list_of_extra : p_.list_of_slots;
      const int entry = (extra ? i - first_extra() : i) * Config::kBlockN + row;
      if (entry >= (extra ? t_.end_key - t_.num_cached : t_.num_cached)) return -1;
      return scheduler::entries_of(list, t_, kv_head_)[entry * list.entry_stride];
    }
    const int key = key_of(i, row), b = t_.batch;
    if (key < t_.first_key || key >= min(t_.end_key, t_.num_cached)) return -1;
    if (!p_.paged) return p_.batch_index.data != nullptr ? common::int_at(p_.batch_index, b) : b;
    return p_.page_table.data[b * p_.page_table.row_stride + page_of(p_.pools[0], key) * p_.page_table.column_stride];
  }

  // The row's address, null if there is none; and the offset of its scales (MLA-584). index: from load_index().
  __device__ __forceinline__ RowAddress locate(int i, int row, int index) const {
    if constexpr (Config::kSparse) {
      if (is_extra(i)) return of_slot(p_.pools[1], index);
      return of_slot(p_.pools[0], index);
    }
    if (!common::page_exists(p_, index)) return {nullptr, 0};
    const int key = key_of(i, row);
    return at(p_.pools[0], index, key - page_of(p_.pools[0], key) * p_.pools[0].page_size);
  }

 private:
  __device__ __forceinline__ int first_extra() const { return (t_.num_cached + Config::kBlockN - 1) / Config::kBlockN; }
  __device__ __forceinline__ bool is_extra(int i) const {
    return p_.list_of_extra.indices != nullptr && i >= first_extra();
  }
  __device__ __forceinline__ int key_of(int i, int row) const {
    return (t_.first_key / Config::kBlockN + i) * Config::kBlockN + row;
  }
  __device__ __forceinline__ RowAddress of_slot(const kernels::RowPool& pool, int slot) const {
    if (static_cast<unsigned>(slot) >= static_cast<unsigned>(pool.num_slots)) return {nullptr, 0};
    const int page = page_of(pool, slot);
    return at(pool, page, slot - page * pool.page_size);
  }
  __device__ __forceinline__ RowAddress at(const kernels::RowPool& pool, int page, int slot) const {
    return {pool.data + kv_head_ * pool.head_stride + page * pool.page_stride + slot * pool.slot_stride,
            pool.page_size * Packed::kRowBytes + slot * (8 - Packed::kRowBytes)};
  }

  const WorkTileParams& p_;
  const WorkTile& t_;
  const int kv_head_;
};

}  // namespace attune::mla
