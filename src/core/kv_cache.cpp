// SPDX-License-Identifier: Apache-2.0
#include "core/kv_cache.h"

#include "core/dtype.h"

namespace attune {
namespace {

constexpr int64_t kMaxPageSize = int64_t{1} << 31;

int64_t stride_of(const attune_tensor& t, int axis) { return t.shape[axis] > 1 ? t.stride[axis] : 0; }

struct PlaneShape {
  KvPlane plane;
  int64_t pages, page_size, heads, dim;
};

// Reads a plain K or V tensor in one of the layouts.
PlaneShape read_plane(const char* name, const attune_tensor& t, int32_t layout, bool is_v, Data data) {
  const bool packed_k = layout == ATTUNE_KV_XPACKED && !is_v;
  check_tensor(name, t,
               {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8},
               {packed_k ? 5 : 4}, data);
  PlaneShape s{};
  s.pages = t.shape[0];
  KvPlane& p = s.plane;
  p.data = static_cast<std::byte*>(t.data);
  p.dtype = t.dtype;
  p.element_size = dtype_size(t.dtype);
  p.page_stride = stride_of(t, 0);
  const bool nhd = layout == ATTUNE_KV_NHD, hnd = layout == ATTUNE_KV_HND;
  const int slot_axis = nhd ? 1 : hnd ? 2 : 3, head_axis = nhd ? 2 : 1, dim_axis = nhd || hnd ? 3 : 2;
  s.page_size = t.shape[slot_axis];
  s.heads = t.shape[head_axis];
  p.slot_stride = stride_of(t, slot_axis);
  p.head_stride = stride_of(t, head_axis);
  if (packed_k) {
    s.dim = t.shape[2] * t.shape[4];
    p.pack = t.shape[4] > 0 ? t.shape[4] : 1;
    p.outer_stride = t.stride[2];
    p.inner_stride = t.shape[4] > 1 ? t.stride[4] : 1;
    p.contiguous = p.inner_stride == 1 && (t.shape[2] == 1 || p.outer_stride == p.pack);
  } else {
    s.dim = t.shape[dim_axis];
    p.inner_stride = s.dim > 1 ? t.stride[dim_axis] : 1;
    p.pack = s.dim > 0 ? s.dim : 1;
    p.contiguous = p.inner_stride == 1;
  }
  return s;
}

// Packed formats: rows of bytes, [pages, page_size, token_bytes] or [pages, bytes].
PlaneShape read_packed(const char* name, const attune_kv_cache& c, const KvFormat& f, Data data) {
  const attune_tensor& t = c.k;
  require(c.layout == ATTUNE_KV_BYTES, name, ".layout must be ATTUNE_KV_BYTES for the format ", f.name, "; it is ",
          c.layout);
  const Name k(name, ".k");
  PlaneShape s{};
  s.heads = 1;
  s.dim = f.head_dim_qk;
  KvPlane& p = s.plane;
  p.data = static_cast<std::byte*>(t.data);
  p.dtype = ATTUNE_UINT8;
  p.element_size = 1;
  p.inner_stride = 1;
  p.pack = f.token_bytes;
  if (f.scale_bytes == 0) {
    check_tensor(k, t, {ATTUNE_UINT8}, {3}, data);
    check_extent(k, t, 2, f.token_bytes, "bytes of a token");
    require(t.stride[2] == 1, k, ".stride[2] is ", t.stride[2], "; the bytes of a token must follow each other (1)");
    s.page_size = t.shape[1];
    p.slot_stride = stride_of(t, 1);
  } else {
    check_tensor(k, t, {ATTUNE_UINT8}, {2}, data);
    require(c.page_size > 0, name, ".page_size is ", c.page_size, "; the format ", f.name,
            " needs it, and it must be > 0");
    require(c.page_size <= kMaxPageSize, name, ".page_size is ", c.page_size, "; it must be at most ", kMaxPageSize);
    require(t.shape[1] >= c.page_size * (f.token_bytes + f.scale_bytes), k, ".shape[1] is ", t.shape[1], "; a page of ",
            c.page_size, " tokens needs ", kv_page_bytes(f, c.page_size), " bytes");
    require(t.stride[1] == 1, k, ".stride[1] is ", t.stride[1], "; the bytes of a page must follow each other (1)");
    s.page_size = c.page_size;
    p.slot_stride = f.token_bytes;
  }
  s.pages = t.shape[0];
  p.page_stride = stride_of(t, 0);
  return s;
}

KvScale read_scale(const char* name, const attune_tensor& t, const KvCache& cache, int32_t layout, int64_t code_bytes,
                   Data data) {
  KvScale s;
  if (!present(t)) return s;
  require(code_bytes == 1 && cache.format->plain, name, " is set, but only plain 8-bit caches have scales");
  check_tensor(name, t, {ATTUNE_FLOAT32}, {1, 3}, data);
  s.data = static_cast<float*>(t.data);
  if (t.rank == 1) {
    require(t.shape[0] == 1 || t.shape[0] == cache.num_heads, name, ".shape[0] is ", t.shape[0],
            "; it must be 1 (per tensor) or ", cache.num_heads, " (num_heads_kv, per head)");
    s.mode = t.shape[0] == 1 ? KvScale::Mode::kTensor : KvScale::Mode::kHead;
    s.head_stride = t.shape[0] > 1 ? t.stride[0] : 0;
    return s;
  }
  const int slot_axis = layout == ATTUNE_KV_NHD ? 1 : 2;
  check_extent(name, t, 0, cache.num_pages, "pages");
  check_extent(name, t, slot_axis, cache.page_size, "page_size");
  check_extent(name, t, 3 - slot_axis, cache.num_heads, "num_heads_kv");
  s.mode = KvScale::Mode::kTokenHead;
  s.page_stride = stride_of(t, 0);
  s.slot_stride = stride_of(t, slot_axis);
  s.head_stride = stride_of(t, 3 - slot_axis);
  return s;
}

IntView read_table(const char* name, const attune_tensor& t, int64_t batch, Data data) {
  if (!present(t)) return {};
  check_tensor(name, t, {ATTUNE_INT32}, {2}, data);
  if (batch >= 0) check_extent(name, t, 0, batch, "batch");
  return int_view(t);
}

}  // namespace

KvCache make_kv_cache(const char* name, const attune_kv_cache& c, CacheUse use, int64_t batch, int64_t head_dim_qk,
                      int64_t head_dim_v, Data data) {
  KvCache out;
  const auto absent = [&](const char* tensor, const attune_tensor& t, const auto&... but) {
    require(!present(t), name, tensor, " is set, but ", but...);
  };
  const auto no_tables = [&](const auto&... but) {
    absent(".page_table", c.page_table, but...), absent(".v_page_table", c.v_page_table, but...);
    absent(".batch_index", c.batch_index, but...);
  };
  const KvFormat* format = kv_format(c.format);
  require(format != nullptr, name, ".format is ", c.format, "; it must be one of attune_kv_format (0..",
          kv_format_count() - 1, ")");
  if (!present(c.k)) {
    for (const auto& [tensor, t] : {std::pair{".v", &c.v}, {".k_scale", &c.k_scale}, {".v_scale", &c.v_scale}})
      absent(tensor, *t, name, ".k is absent");
    no_tables(name, ".k is absent");
    require(c.ring_capacity == 0, name, ".ring_capacity is ", c.ring_capacity, ", but ", name, ".k is absent");
    require(c.layout >= ATTUNE_KV_NHD && c.layout <= ATTUNE_KV_BYTES, name, ".layout is ", c.layout,
            "; it must be one of attune_kv_layout (0..", static_cast<int>(ATTUNE_KV_BYTES), ")");
    return out;
  }
  out.format = format;
  PlaneShape k;
  if (format->plain) {
    require(c.layout == ATTUNE_KV_NHD || c.layout == ATTUNE_KV_HND || c.layout == ATTUNE_KV_XPACKED, name,
            ".layout is ", c.layout,
            "; a plain format needs ATTUNE_KV_NHD (0), ATTUNE_KV_HND (1) or ATTUNE_KV_XPACKED (2)");
    k = read_plane(Name(name, ".k"), c.k, c.layout, false, data);
    out.x_packed = c.layout == ATTUNE_KV_XPACKED;
  } else {
    k = read_packed(name, c, *format, data);
    require(!present(c.v), name, ".v is set, but in the format ", format->name, " V is part of K");
  }
  require(k.page_size >= 1 && k.page_size <= kMaxPageSize, name, ": page_size is ", k.page_size, "; it must be 1..",
          kMaxPageSize);
  require(c.page_size == 0 || c.page_size == k.page_size, name, ".page_size is ", c.page_size, ", but ", name,
          ".k has pages of ", k.page_size, " token", plural_s(k.page_size));
  require(k.heads >= 1, name, ".k has ", k.heads, " heads; it must have at least 1");
  require(k.dim >= 1, name, ".k has head_dim ", k.dim, "; it must be at least 1");
  out.k = k.plane;
  out.num_pages = k.pages;
  out.page_size = k.page_size;
  out.num_heads = k.heads;
  out.head_dim_qk = k.dim;
  require(format->plain || head_dim_qk == 0 || k.dim == head_dim_qk, name, ": head_dim_qk is ", head_dim_qk,
          "; the format ", format->name, " has ", k.dim);
  require(head_dim_qk == 0 || k.dim == head_dim_qk, name, ".k has head_dim ", k.dim, "; it must be ", head_dim_qk,
          " (head_dim_qk)");
  if (present(c.v)) {
    const PlaneShape v = read_plane(Name(name, ".v"), c.v, c.layout, true, data);
    require(v.pages == k.pages, name, ".v has ", v.pages, " page", plural_s(v.pages), ", but ", name, ".k has ",
            k.pages);
    require(v.page_size == k.page_size, name, ".v has pages of ", v.page_size, " token", plural_s(v.page_size),
            ", but ", name, ".k of ", k.page_size);
    require(v.heads == k.heads, name, ".v has ", v.heads, " head", plural_s(v.heads), ", but ", name, ".k has ",
            k.heads);
    require(v.dim >= 1, name, ".v has head_dim ", v.dim, "; it must be at least 1");
    require(head_dim_v == 0 || v.dim == head_dim_v, name, ".v has head_dim ", v.dim, "; it must be ", head_dim_v,
            " (head_dim_v)");
    out.v = v.plane;
    out.head_dim_v = v.dim;
  } else {
    out.v_aliases_k = true;
    out.v = k.plane;
    out.head_dim_v = format->plain ? head_dim_v : format->head_dim_v;
    require(head_dim_v == 0 || head_dim_v == out.head_dim_v, name, ": head_dim_v is ", head_dim_v, "; the format ",
            format->name, " has ", out.head_dim_v);
    require(out.head_dim_v >= 1 && out.head_dim_v <= k.dim, name,
            ".v is absent, so V is the first head_dim_v columns of K, and head_dim_v is ", out.head_dim_v,
            "; it must be 1..", k.dim);
    require(!present(c.v_scale), name, ".v_scale is set, but V is part of K: k_scale serves both");
    require(!present(c.v_page_table), name, ".v_page_table is set, but V is part of K");
  }
  out.k_scale = read_scale(Name(name, ".k_scale"), c.k_scale, out, c.layout, out.k.element_size, data);
  out.v_scale = out.v_aliases_k
                    ? out.k_scale
                    : read_scale(Name(name, ".v_scale"), c.v_scale, out, c.layout, out.v.element_size, data);
  out.one_factor = format->plain;
  if (format->plain) {
    require(out.k.dtype != ATTUNE_INT8 || present(c.k_scale), name, ".k is int8 and needs ", name, ".k_scale");
    require(out.v.dtype != ATTUNE_INT8 || out.v_aliases_k || present(c.v_scale), name, ".v is int8 and needs ", name,
            ".v_scale");
  }
  require(c.ring_capacity >= 0, name, ".ring_capacity is ", c.ring_capacity, "; it must be >= 0");
  if (use == CacheUse::kSlots) {
    no_tables("indices name slots; page_table, v_page_table and batch_index must be absent");
    require(c.ring_capacity == 0, name, ".ring_capacity is ", c.ring_capacity, "; indices name slots, so it must be 0");
    return out;
  }
  out.page_table = read_table(Name(name, ".page_table"), c.page_table, batch, data);
  out.v_page_table = read_table(Name(name, ".v_page_table"), c.v_page_table, batch, data);
  out.paged = present(c.page_table);
  require(out.paged || !present(c.v_page_table), name, ".v_page_table is set, but ", name, ".page_table is absent");
  if (present(c.v_page_table))
    check_extent(Name(name, ".v_page_table"), c.v_page_table, 1, out.page_table.cols, "columns of page_table");
  if (present(c.batch_index)) {
    require(!out.paged, name, ".batch_index is for contiguous caches, but ", name, ".page_table is set");
    check_tensor(Name(name, ".batch_index"), c.batch_index, {ATTUNE_INT32}, {1}, data);
    if (batch >= 0) check_extent(Name(name, ".batch_index"), c.batch_index, 0, batch, "batch");
    out.batch_index = int_view(c.batch_index);
  }
  if (!out.paged && !present(c.batch_index) && batch >= 0) {
    require(out.num_pages >= batch, name, ".k has ", out.num_pages, " row", plural_s(out.num_pages),
            ", but the batch is ", batch, " (a contiguous cache has a row for each sequence, or batch_index)");
  }
  if (c.ring_capacity > 0) {
    const int64_t most = out.paged ? out.page_table.cols * out.page_size : out.page_size;
    require(c.ring_capacity <= most, name, ".ring_capacity is ", c.ring_capacity, "; the cache holds ", most, " token",
            plural_s(most), " of a sequence");
    out.ring_capacity = c.ring_capacity;
  }
  return out;
}

}  // namespace attune
