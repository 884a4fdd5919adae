// SPDX-License-Identifier: Apache-2.0
// Finds the page, the slot and the scale of a cached key.
#pragma once

#include "common/int_table.cuh"
#include "common/kv_codec.cuh"
#include "common/work_tile_params.h"

namespace attune::common {

using kernels::WorkTileParams;

// The page and slot of a cached key. The load from the page table is in flight until `page` is used.
struct Slot {
  int page, slot;
};
__device__ __forceinline__ int page_index(const WorkTileParams& p, int key) {
  return p.page_shift >= 0 ? key >> p.page_shift : key / p.page_size;
}
__device__ __forceinline__ int slot_in_page(const WorkTileParams& p, int key) {
  return p.paged ? key - page_index(p, key) * p.page_size : key;
}
__device__ __forceinline__ Slot find_slot(const WorkTileParams& p, int batch, int key, bool values) {
  Slot s{batch, slot_in_page(p, key)};
  if (p.paged) {
    const kernels::IntTable& table = values && p.v_page_table.data != nullptr ? p.v_page_table : p.page_table;
    s.page = int_at(table, batch, page_index(p, key));
  } else if (p.batch_index.data != nullptr) {
    s.page = int_at(p.batch_index, batch);
  }
  return s;
}
__device__ __forceinline__ bool page_exists(const WorkTileParams& p, int page) {
  return page >= 0 && page < p.num_pages;
}
// Whether the page of a cached key's value exists. A key whose value does not exist is masked.
__device__ __forceinline__ bool has_value(const WorkTileParams& p, int batch, int key) {
  return p.v_page_table.data == nullptr || page_exists(p, find_slot(p, batch, key, true).page);
}

// The scale of a key of K, or of its value.
__device__ __forceinline__ RowScale scale_of(const WorkTileParams& p, const kernels::WorkTile& t, int kv_head, int key,
                                             bool values) {
  return row_scale(
      values ? p.v_scale : p.k_scale, kv_head, [&] { return find_slot(p, t.batch, key, values); },
      [&](int page) { return page_exists(p, page); });
}
// The scales of K and of V, from one look-up if both have the same page table.
__device__ __forceinline__ float2 scales_of(const WorkTileParams& p, const kernels::WorkTile& t, int kv_head, int key) {
  const Slot s = find_slot(p, t.batch, key, false);
  const auto of_value = [&] { return p.v_page_table.data == nullptr ? s : find_slot(p, t.batch, key, true); };
  return {scale_at(p, p.k_scale, kv_head, [&] { return s; }), scale_at(p, p.v_scale, kv_head, of_value)};
}

}  // namespace attune::common
