// SPDX-License-Identifier: Apache-2.0
#include "cpu/tile_source.h"

#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "cpu/kv_rows.h"

namespace attune::cpu {
namespace {

int64_t row_type_size(TileType t) { return t == TileType::kF32 ? 4 : 2; }
int32_t row_type_dtype(TileType t) {
  return t == TileType::kF32 ? ATTUNE_FLOAT32 : t == TileType::kBF16 ? ATTUNE_BFLOAT16 : ATTUNE_FLOAT16;
}

}  // namespace

void TileSource::hide(int i, Scratch& scratch) const {
  KvTile& t = *scratch.tile;
  t.k[i] = t.v[i] = scratch.zeros;
  t.masked[i] = true;
  t.any_hidden = true;
  t.k_factor[i] = t.v_factor[i] = 1.0f;
}

// A row of the row type from contiguous elements of dtype: in place if they have that type, else converted.
const void* TileSource::stage(const std::byte* row, int32_t dtype, int64_t n, std::byte* to, float* temporary) const {
  if (dtype == row_type_dtype(row_type_)) return row;
  if (row_type_ == TileType::kF32) {
    kernels_.to_f32(static_cast<attune_dtype>(dtype), row, n, reinterpret_cast<float*>(to));
  } else if (dtype == ATTUNE_FLOAT8_E4M3 || dtype == ATTUNE_FLOAT8_E5M2 || dtype == ATTUNE_INT8) {
    kernels_.to_bf16(static_cast<attune_dtype>(dtype), row, n, reinterpret_cast<bf16_t*>(to));
  } else {
    kernels_.to_f32(static_cast<attune_dtype>(dtype), row, n, temporary);
    kernels_.to_bf16(ATTUNE_FLOAT32, temporary, n, reinterpret_cast<bf16_t*>(to));
  }
  return to;
}

// The same for rows that may be strided: element d lies element(d) elements from the row's address.
template <class Element>
const void* TileSource::place(const std::byte* row, int32_t dtype, bool contiguous, int64_t n, std::byte* to,
                              Scratch& scratch, const Element& element) const {
  if (contiguous) return stage(row, dtype, n, to, scratch.row_f32);
  // Gathered elements take at most 4 bytes each, whatever their dtype.
  alignas(64) std::byte codes[kMaxHeadDim * 4];
  const auto size = static_cast<size_t>(dtype_size(dtype));
  for (int64_t d = 0; d < n; ++d)
    std::memcpy(codes + d * static_cast<int64_t>(size), row + element(d) * static_cast<int64_t>(size), size);
  if (const void* at = stage(codes, dtype, n, to, scratch.row_f32); at != codes) return at;
  std::memcpy(to, codes, static_cast<size_t>(n) * size);
  return to;
}

void TileSource::put_slot(const KvCache& c, KvSlot k, KvSlot v, int64_t kv_head, int i, Scratch& scratch) const {
  if (k.page < 0 || v.page < 0) return hide(i, scratch);
  KvTile& t = *scratch.tile;
  const int64_t size = row_type_size(row_type_);
  std::byte* k_to = scratch.k_stage + i * scratch.ld_q * size;
  std::byte* v_to = scratch.v_stage + i * scratch.ld_o * size;
  t.masked[i] = false;
  t.k_factor[i] = t.v_factor[i] = 1.0f;
  if (!c.one_factor) {
    const auto decode = [&](auto read_row, KvSlot slot, int64_t n, std::byte* to) {
      read_row(c, slot, kv_head, row_type_ == TileType::kF32 ? reinterpret_cast<float*>(to) : scratch.row_f32);
      if (row_type_ == TileType::kBF16)
        kernels_.to_bf16(ATTUNE_FLOAT32, scratch.row_f32, n, reinterpret_cast<bf16_t*>(to));
      return to;
    };
    t.k[i] = decode(read_k_row, k, c.head_dim_qk, k_to);
    t.v[i] = c.v_aliases_k ? t.k[i] : decode(read_v_row, v, c.head_dim_v, v_to);
    return;
  }
  const auto place_row = [&](const KvPlane& p, KvSlot s, int64_t n, std::byte* to) {
    return place(p.row(s.page, s.offset, kv_head), p.dtype, p.contiguous, n, to, scratch,
                 [&](int64_t d) { return p.element(d); });
  };
  t.k[i] = place_row(c.k, k, c.head_dim_qk, k_to);
  t.v[i] = c.v_aliases_k ? t.k[i] : place_row(c.v, v, c.head_dim_v, v_to);
  if (c.k_scale.mode != KvScale::Mode::kNone) t.k_factor[i] = *c.k_scale.at(k.page, k.offset, kv_head);
  if (c.v_scale.mode != KvScale::Mode::kNone) t.v_factor[i] = *c.v_scale.at(v.page, v.offset, kv_head);
}

void TileSource::put_dense(int64_t row, int64_t kv_head, int i, Scratch& scratch) const {
  KvTile& t = *scratch.tile;
  const int64_t size = row_type_size(row_type_);
  const auto place_row = [&](const RowView& v, int64_t n, std::byte* to) {
    return place(v.at(row, kv_head), v.dtype, v.dim_stride == 1, n, to, scratch,
                 [&](int64_t d) { return d * v.dim_stride; });
  };
  t.masked[i] = false;
  t.k_factor[i] = t.v_factor[i] = 1.0f;
  t.k[i] = place_row(dense_.k, p_.head_dim_qk, scratch.k_stage + i * scratch.ld_q * size);
  t.v[i] = p_.v_aliases_k ? t.k[i] : place_row(dense_.v, p_.head_dim_v, scratch.v_stage + i * scratch.ld_o * size);
}

// The row of the page table (or of the contiguous cache) that holds position t of sequence b; -1: a bad beam.
int64_t TileSource::table_row(const Sequence& s, int64_t b, int64_t t) const {
  if (!p_.cache_indirection) return b;
  const int64_t base = b / p_.beam_width * p_.beam_width;
  const bool wrapped = p_.cache.ring_capacity > 0 && s.num_cached > p_.cache.ring_capacity;
  if (p_.beam_prompt_length && !wrapped && t < p_.beam_prompt_length(b)) return base;
  const int64_t column = p_.cache.ring_capacity > 0 ? t % p_.cache.ring_capacity : t;
  if (column >= p_.cache_indirection.cols) return -1;
  const int64_t beam = p_.cache_indirection(b, column);
  return beam >= 0 && beam < p_.beam_width ? base + beam : -1;
}

void TileSource::load_sparse(const Sequence& s, int64_t b, int64_t q_row, int64_t kv_head, int64_t first, int n,
                             Scratch& scratch) const {
  const int64_t used = p_.list.used(q_row, b);
  for (int i = 0; i < n; ++i) {
    const int64_t entry = first + i;
    const bool extra = entry >= used;
    const int64_t index = extra ? p_.extra_list.at(q_row, kv_head, entry - used) : p_.list.at(q_row, kv_head, entry);
    if (!p_.cache) {
      if (index < 0 || index >= s.num_dense) {
        hide(i, scratch);
      } else {
        put_dense(s.kv_begin + index, kv_head, i, scratch);
      }
      continue;
    }
    const KvCache& c = extra ? p_.extra_cache : p_.cache;
    if (index < 0 || index >= c.num_slots()) {
      hide(i, scratch);
      continue;
    }
    const KvSlot slot{index / c.page_size, index % c.page_size};
    put_slot(c, slot, slot, kv_head, i, scratch);
  }
}

// Calls emit(i, k, v, run) for every run of cached columns in [i, end) that share a page, by one look-up.
template <class Emit>
void for_each_run(const KvCache& c, int64_t b, int64_t first, int i, int end, Emit&& emit) {
  while (i < end) {
    const int64_t position = first + i;
    const KvSlot k = c.find(b, position, false);
    const KvSlot v = c.v_page_table ? c.find(b, position, true) : k;
    int64_t run = std::min<int64_t>(end - i, c.page_size - k.offset);
    if (c.ring_capacity > 0) run = std::min(run, c.ring_capacity - position % c.ring_capacity);
    emit(i, k, v, static_cast<int>(run));
    i += static_cast<int>(run);
  }
}

// Loads the cached columns [i, n) of rows with one factor. A row that needs no conversion costs one addition.
int TileSource::load_runs(const Sequence& s, int64_t b, int64_t kv_head, int64_t first, int i, int n,
                          Scratch& scratch) const {
  const KvCache& c = p_.cache;
  KvTile& t = *scratch.tile;
  const int end = static_cast<int>(std::min<int64_t>(n, s.num_cached - first));
  const int32_t in_place = row_type_dtype(row_type_);
  const bool codes = codes_in_place_ && end == n && c.k.element_size == 1 && c.k.dtype == c.v.dtype;
  const bool direct = c.k.contiguous && c.v.contiguous && (codes || (c.k.dtype == in_place && c.v.dtype == in_place));
  if (direct && codes) t.codes = static_cast<attune_dtype>(c.k.dtype);
  for_each_run(c, b, first, i, end, [&](int at, KvSlot k, KvSlot v, int run) {
    if (!direct || k.page < 0 || v.page < 0) {
      for (int j = at; j < at + run; ++j, ++k.offset, ++v.offset) put_slot(c, k, v, kv_head, j, scratch);
      return;
    }
    const std::byte* k_row = c.k.row(k.page, k.offset, kv_head);
    const std::byte* v_row = c.v.row(v.page, v.offset, kv_head);
    const int64_t k_step = c.k.slot_stride * c.k.element_size, v_step = c.v.slot_stride * c.v.element_size;
    for (int j = 0; j < run; ++j) {
      t.k[at + j] = k_row + j * k_step;
      t.v[at + j] = v_row + j * v_step;
      t.masked[at + j] = false;
    }
  });
  t.in_place = direct && i == 0 && end == n && !t.any_hidden;
  if (direct && t.scaled) load_factors(b, kv_head, first, i, end, scratch);
  return end > i ? end : i;
}

// Loads the scales of the cached columns [begin, end) of rows with one factor. Those of masked columns are not used.
void TileSource::load_factors(int64_t b, int64_t kv_head, int64_t first, int begin, int end, Scratch& scratch) const {
  const KvCache& c = p_.cache;
  KvTile& t = *scratch.tile;
  for_each_run(c, b, first, begin, end, [&](int at, KvSlot k, KvSlot v, int run) {
    if (k.page < 0 || v.page < 0) return;
    auto fill = [&](const KvScale& scale, KvSlot slot, float* to) {
      if (scale.mode == KvScale::Mode::kNone) {
        std::fill(to, to + run, 1.0f);
        return;
      }
      const float* from = scale.at(slot.page, slot.offset, kv_head);
      if (scale.mode != KvScale::Mode::kTokenHead) {
        std::fill(to, to + run, *from);
        return;
      }
      for (int j = 0; j < run; ++j) to[j] = from[j * scale.slot_stride];
    };
    fill(c.k_scale, k, t.k_factor + at);
    fill(c.v_scale, v, t.v_factor + at);
  });
}

// Reads the scales by token and head, of all heads of the item and columns [first, first + n), in memory order.
void TileSource::gather_factors(const Item& item, int64_t first, int n, float* factors) const {
  const KvCache& c = p_.cache;
  for_each_run(c, item.sequence, first, 0, n, [&](int at, KvSlot k, KvSlot v, int run) {
    auto gather = [&](const KvScale& scale, KvSlot slot, float* to) {
      if (scale.mode != KvScale::Mode::kTokenHead) return;
      for (int j = at; j < at + run; ++j, ++slot.offset) {
        const float* from = scale.at(slot.page, slot.offset, item.kv_head);
        for (int h = 0; h < item.num_heads; ++h) to[h * kDecodeN + j] = from[h * scale.head_stride];
      }
    };
    gather(c.k_scale, k, factors);
    gather(c.v_scale, v, factors + kDecodeRows * kDecodeN);
  });
}

bool TileSource::next_head(const Item& item, int h, int64_t first, Scratch& scratch) const {
  KvTile& t = *scratch.tile;
  if (!t.in_place) return false;
  const KvCache& c = p_.cache;
  const int64_t k_step = c.k.head_stride * c.k.element_size, v_step = c.v.head_stride * c.v.element_size;
  for (int i = 0; i < t.n; ++i) {
    t.k[i] = static_cast<const std::byte*>(t.k[i]) + k_step;
    t.v[i] = static_cast<const std::byte*>(t.v[i]) + v_step;
  }
  if (!t.scaled) return true;
  if (h == 1) gather_factors(item, first, t.n, scratch.factors);
  auto put = [&](const KvScale& scale, const float* gathered, float* to) {
    if (scale.mode == KvScale::Mode::kTokenHead) {
      std::copy_n(gathered + h * kDecodeN, t.n, to);
    } else if (scale.mode != KvScale::Mode::kNone) {
      std::fill_n(to, t.n, *scale.at(0, 0, item.kv_head + h));
    }
  };
  put(c.k_scale, scratch.factors, t.k_factor);
  put(c.v_scale, scratch.factors + kDecodeRows * kDecodeN, t.v_factor);
  return true;
}

// Prefetches scales by token of `count` tokens from slot on. Those of all heads of a token are a line or two.
void prefetch_scales(const KvScale& scale, KvSlot slot, int64_t kv_head, int count) {
  if (scale.mode != KvScale::Mode::kTokenHead) return;
  const float* from = scale.at(slot.page, slot.offset, kv_head);
  const int64_t step = std::max<int64_t>(scale.slot_stride, 1);
  for (int64_t j = 0; j < count * step; j += std::max<int64_t>(step, 16)) __builtin_prefetch(from + j, 0, 2);
}

void TileSource::look_ahead_dense(const Sequence& s, int64_t kv_head, int64_t first, int n, AheadRows& a) const {
  if (p_.sparse || dense_.k.dim_stride != 1 || dense_.v.dim_stride != 1) return;
  a.k_bytes = p_.head_dim_qk * dense_.k.element_size;
  a.v_bytes = p_.head_dim_v * dense_.v.element_size;
  a.k_step = dense_.k.head_stride * dense_.k.element_size;
  a.v_step = dense_.v.head_stride * dense_.v.element_size;
  a.n = static_cast<int>(std::clamp<int64_t>(s.num_dense - first, 0, n));
  for (int i = 0; i < a.n; ++i) {
    a.k[i] = dense_.k.at(s.kv_begin + first + i, kv_head);
    a.v[i] = p_.v_aliases_k ? a.k[i] : dense_.v.at(s.kv_begin + first + i, kv_head);
  }
}

void TileSource::look_ahead(const Sequence& s, int64_t b, int64_t q_row, int64_t kv_head, int64_t first, int n,
                            AheadRows& a) const {
  a.n = 0;
  if (!p_.cache) return look_ahead_dense(s, kv_head, first, n, a);
  if (p_.cache_indirection) return;
  const KvCache& c = p_.cache;
  if (!c.k.contiguous && c.format->plain) return;
  const KvFormat& f = *c.format;
  a.k_bytes = f.plain ? c.head_dim_qk * c.k.element_size : f.token_bytes;
  a.v_bytes = c.head_dim_v * c.v.element_size;
  a.k_step = c.k.head_stride * c.k.element_size;
  a.v_step = c.v.head_stride * c.v.element_size;
  auto add = [&](KvSlot k, KvSlot v) {
    if (k.page < 0 || v.page < 0) return;
    a.k[a.n] = c.k.row(k.page, k.offset, kv_head);
    a.v[a.n] = c.v_aliases_k || !c.v.contiguous ? a.k[a.n] : c.v.row(v.page, v.offset, kv_head);
    ++a.n;
  };
  if (p_.sparse) {
    const int64_t end = std::min<int64_t>(first + n, p_.list.used(q_row, b));
    for (int64_t entry = first; entry < end; ++entry) {
      const int64_t index = p_.list.at(q_row, kv_head, entry);
      if (index < 0 || index >= c.num_slots()) continue;
      const KvSlot slot{index / c.page_size, index % c.page_size};
      add(slot, slot);
    }
    return;
  }
  const int end = static_cast<int>(std::min<int64_t>(n, s.num_cached - first));
  for_each_run(c, b, first, 0, end, [&](int, KvSlot k, KvSlot v, int run) {
    if (k.page >= 0) prefetch_scales(c.k_scale, k, kv_head, run);
    if (v.page >= 0) prefetch_scales(c.v_scale, v, kv_head, run);
    for (int j = 0; j < run; ++j, ++k.offset, ++v.offset) add(k, v);
  });
}

void TileSource::load(const Sequence& s, int64_t b, int64_t q_row, int64_t kv_head, int64_t first, int64_t begin, int n,
                      Scratch& scratch) const {
  KvTile& tile = *scratch.tile;
  tile.n = n;
  tile.codes = ATTUNE_DTYPE_NONE;
  tile.any_hidden = false;
  tile.in_place = false;
  const auto has = [](const KvScale& scale) { return scale.mode != KvScale::Mode::kNone; };  // also without a cache
  tile.scaled =
      has(p_.cache.k_scale) || has(p_.cache.v_scale) || has(p_.extra_cache.k_scale) || has(p_.extra_cache.v_scale);
  if (p_.sparse) return load_sparse(s, b, q_row, kv_head, first, n, scratch);
  int i = 0;
  for (; i < n && first + i < begin; ++i) hide(i, scratch);
  if (!p_.cache_indirection && p_.cache && p_.cache.one_factor && i == 0)
    i = load_runs(s, b, kv_head, first, i, n, scratch);
  for (; i < n && first + i < s.num_cached; ++i) {
    const int64_t t = first + i;
    const int64_t row = table_row(s, b, t);
    if (row < 0) {
      hide(i, scratch);
      continue;
    }
    const KvSlot k = p_.cache.find(row, t, false);
    put_slot(p_.cache, k, p_.cache.v_page_table ? p_.cache.find(row, t, true) : k, kv_head, i, scratch);
  }
  for (; i < n; ++i) put_dense(s.kv_begin + first + i - s.num_cached, kv_head, i, scratch);
}

}  // namespace attune::cpu
