// SPDX-License-Identifier: Apache-2.0
// Where the rows of keys lie, for threads that copy them one by one: in slots by a list, in pages by a table, or dense.
#pragma once

#include "mla/config.cuh"

namespace attune::mla {

// Of one tile.
class KvSource {
 public:
  __device__ __forceinline__ KvSource(const PrefillParams& p, const WorkTile& t, int kv_head, const Tile& tile)
      : p_(p), tile_(tile), pool_(p.pools[is_dense(p, tile) || (Config::kSparse && !tile.cached) ? 1 : 0]) {
    data_ = pool_.data + kv_head * pool_.head_stride;
    limit_ = pool_.num_slots;
    if (is_dense(p, tile)) {
      data_ += t.batch * pool_.batch_stride + t.kv_row * pool_.slot_stride;
      limit_ = t.num_keys;
    }
    if constexpr (Config::kSparse) {
      const kernels::SlotList& list = tile.cached ? p.list_of_slots : p.list_of_extra;
      table_ = prefill::entries_of(list, t, kv_head);
      step_ = list.entry_stride;
      offset_ = tile.cached ? 0 : t.num_cached;
    } else {
      offset_ = t.num_cached;  // of dense rows
      if (p.paged) {
        table_ = p.page_table.data + t.batch * p.page_table.row_stride;
        step_ = p.page_table.col_stride;
      } else {
        only_page_ = p.batch_index.data != nullptr ? prefill::int_at(p.batch_index, t.batch) : t.batch;
      }
    }
  }

  // What the list or the table says of a key; a load, so that it can be asked for ahead. -1: the key is not to be read.
  __device__ __forceinline__ int load_index(int key) const {
    if (key < tile_.low || key >= tile_.high) return -1;
    if constexpr (Config::kSparse) return table_[(key - offset_) * step_];
    if (is_dense(p_, tile_)) return key - offset_;
    return p_.paged ? table_[page_of(pool_, key) * step_] : only_page_;
  }

  // The row of a key, or null where there is none: an entry or a page out of range. answer: what ask() said.
  __device__ __forceinline__ const char* locate(int key, int index) const {
    if (Config::kSparse || is_dense(p_, tile_)) {
      if (static_cast<unsigned>(index) >= static_cast<unsigned>(limit_)) return nullptr;
      const int page = page_of(pool_, index);
      return data_ + page * pool_.page_stride + (index - page * pool_.page_size) * pool_.slot_stride;
    }
    if (!prefill::is_there(p_, index)) return nullptr;
    return data_ + index * pool_.page_stride + slot_of(key) * pool_.slot_stride;
  }

  // Of a row of a packed format, how far from it its scales are: within it, or in a plane behind the page's rows.
  __device__ __forceinline__ int scales_of(int key, int index) const {
    if constexpr (Config::kProducer != kernels::kMlaDequant584) return Packed::kNope;
    const int slot = Config::kSparse ? index - page_of(pool_, index) * pool_.page_size : slot_of(key);
    return pool_.page_size * Packed::kRowBytes + slot * (8 - Packed::kRowBytes);
  }

 private:
  __device__ __forceinline__ static bool is_dense(const PrefillParams& p, const Tile& tile) {
    return Config::kDense && (Config::kSparse || !tile.cached);
  }
  __device__ __forceinline__ int slot_of(int key) const { return key - page_of(pool_, key) * pool_.page_size; }

  const PrefillParams& p_;
  const Tile& tile_;
  const kernels::RowPool& pool_;
  const char* data_;
  const int* table_ = nullptr;
  long long step_ = 0;
  int limit_, offset_ = 0, only_page_ = -1;
};

}  // namespace attune::mla
