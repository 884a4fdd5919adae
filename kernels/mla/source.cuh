// SPDX-License-Identifier: Apache-2.0
// Where the rows of keys lie: in pages by a table, in slots by a list, or dense.
#pragma once

#include "mla/config.cuh"

namespace attune::mla {

// The row of a key of a tile, or null where there is none: an entry or a page out of range. kv_head: of all.
class Source {
 public:
  __device__ __forceinline__ Source(const PrefillParams& p, const Task& t, int kv_head)
      : p_(p), t_(t), kv_head_(kv_head) {}

  // The number that the list or the table has for a key within the tile; a load, so that it can be asked for ahead.
  __device__ __forceinline__ int ask(const Tile& tile, int key) const {
    if (key < tile.low || key >= tile.high) return -1;
    if constexpr (Config::kSparse) {
      const kernels::SlotList& list = tile.cached ? p_.list_of_slots : p_.list_of_extra;
      const int entry = tile.cached ? key : key - t_.num_cached;
      const long long row = prefill::row_of_token(p_, t_, t_.token_begin);
      return list.indices[row * list.row_stride + kv_head_ * list.head_stride + entry * list.entry_stride];
    }
    return tile.cached ? prefill::find_slot(p_, t_.batch, key, false).page : key - t_.num_cached;
  }

  // answer: what ask() said.
  __device__ __forceinline__ const char* find(const Tile& tile, int key, int answer) const {
    if (answer < 0) return nullptr;
    if (Config::kSparse ? p_.cached == 0 : !tile.cached) {
      if (answer >= t_.num_keys) return nullptr;
      return p_.new_k.data + (t_.batch * p_.new_k.batch_stride + (t_.kv_row + answer) * p_.new_k.row_stride +
                              kv_head_ * p_.new_k.head_stride) *
                                 2;
    }
    if constexpr (Config::kSparse) {
      if (tile.cached) return slot(p_.k, p_.num_pages, p_.page_size, p_.page_shift, answer);
      return slot(p_.extra_k, p_.num_extra_pages, p_.extra_page_size, p_.extra_page_shift, answer);
    }
    if (!prefill::is_there(p_, answer)) return nullptr;
    return p_.k.data + answer * p_.k.page_stride + prefill::slot_in_page(p_, key) * p_.k.slot_stride +
           kv_head_ * p_.k.head_stride;
  }

  // Of a row of the MLA-584 format, how far from it its scales are: in a plane behind the page's rows.
  __device__ __forceinline__ int scales_of(const Tile& tile, int key, int answer) const {
    const bool extra = Config::kSparse && !tile.cached;
    const int page_size = extra ? p_.extra_page_size : p_.page_size, shift = extra ? p_.extra_page_shift : p_.page_shift;
    const int offset = Config::kSparse ? answer - divide(answer, page_size, shift) * page_size : prefill::slot_in_page(p_, key);
    return page_size * 576 + offset * (8 - 576);
  }

 private:
  __device__ __forceinline__ static int divide(int x, int by, int shift) { return shift >= 0 ? x >> shift : x / by; }
  __device__ __forceinline__ const char* slot(const kernels::KvPlane& plane, long long num_pages, int page_size,
                                              int shift, int number) const {
    const int page = divide(number, page_size, shift);
    if (page >= num_pages) return nullptr;
    return plane.data + page * plane.page_stride + (number - page * page_size) * plane.slot_stride +
           kv_head_ * plane.head_stride;
  }

  const PrefillParams& p_;
  const Task& t_;
  const int kv_head_;
};

}  // namespace attune::mla
