// SPDX-License-Identifier: Apache-2.0
// A user's cache, checked and normalised: whatever its layout, a token is (page, offset) and a row is an address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attune/attune.h"
#include "common/kv_scale.h"
#include "core/kv_format.h"
#include "core/tensor.h"

namespace attune {

// Where the rows of K, or of V, lie. Element d of (page, offset, head) is at
// page * page_stride + offset * slot_stride + head * head_stride + (d / pack) * outer_stride + (d % pack) *
// inner_stride.
struct KvPlane {
  std::byte* data = nullptr;
  int32_t dtype = ATTUNE_DTYPE_NONE;
  int64_t element_size = 1;
  int64_t page_stride = 0, slot_stride = 0, head_stride = 0;  // in elements
  int64_t pack = 1, outer_stride = 0, inner_stride = 0;
  bool contiguous = false;  // the elements of a row follow each other

  std::byte* row(int64_t page, int64_t offset, int64_t head) const {
    return data + (page * page_stride + offset * slot_stride + head * head_stride) * element_size;
  }
  int64_t element(int64_t d) const { return (d / pack) * outer_stride + (d % pack) * inner_stride; }
};

struct KvSlot {
  int64_t page = -1;  // -1: no such token (bad page id)
  int64_t offset = 0;
};

struct KvCache {
  const KvFormat* format = nullptr;  // null: not given
  KvPlane k, v;                      // v repeats k where V aliases K
  KvScale k_scale, v_scale;
  bool v_aliases_k = false;
  int64_t num_pages = 0, page_size = 0, num_heads = 0, head_dim_qk = 0, head_dim_v = 0;
  bool paged = false;
  bool x_packed = false;  // ATTUNE_KV_XPACKED: k.pack is x
  // A row is elements as they lie in memory, all of them with one factor or none. Else only its codec reads it.
  bool one_factor = false;
  IntView page_table, v_page_table, batch_index;
  int64_t ring_capacity = 0;

  explicit operator bool() const { return format != nullptr; }
  // True if scales of K, of V or of both are computed and written with the rows; else they are only read.
  bool writes_scales() const { return format != nullptr && (!format->plain || has_token_scales()); }
  bool quantized() const { return format != nullptr && (!format->plain || k.element_size == 1); }
  int token_scales() const { return attune::token_scales(k_scale, v_scale); }
  bool has_token_scales() const { return token_scales() != 0; }
  int64_t num_slots() const { return num_pages * page_size; }
  // The most tokens that one sequence can hold. A ring counts further; this is what it retains.
  int64_t capacity() const {
    if (ring_capacity > 0) return ring_capacity;
    return paged ? page_table.cols * page_size : page_size;
  }
  // Slot of position t of table row b. The caller guarantees that t is in use: past the end tables are never read.
  KvSlot find(int64_t b, int64_t t, bool of_v) const {
    if (ring_capacity > 0) t %= ring_capacity;
    if (!paged) {
      const int64_t row = batch_index ? batch_index(b) : b;
      return {row >= 0 && row < num_pages ? row : -1, t};
    }
    const IntView& table = of_v && v_page_table ? v_page_table : page_table;
    const int64_t page = table(b, t / page_size);
    return {page >= 0 && page < num_pages ? page : -1, t % page_size};
  }
};

enum class CacheUse { kSequences, kSlots };  // by table or row and position, or by slot number alone

// Checks every field; name prefixes the messages ("cache"). head_dim_qk and head_dim_v: 0 = whatever the cache says
// (head_dim_v must be given where V aliases K in a plain format). batch: rows of the tables; -1: not known. Without
// a cache (no k) the view is empty.
KvCache make_kv_cache(const char* name, const attune_kv_cache& c, CacheUse use, int64_t batch, int64_t head_dim_qk,
                      int64_t head_dim_v, Data data);

}  // namespace attune
