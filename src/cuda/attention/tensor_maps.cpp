// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/tensor_maps.h"

#include "core/integers.h"

#include <algorithm>

namespace attune::cuda::attention {
namespace {

TensorMapDesc start_map(const Problem& p, const void* data, int32_t rows_of_box, int32_t heads_of_box) {
  TensorMapDesc m;
  m.data = const_cast<void*>(data != nullptr ? data : static_cast<const void*>(p.q.data));
  m.type = p.q.dtype == ATTUNE_BFLOAT16 ? TensorMapType::kBfloat16 : TensorMapType::kFloat16;
  m.rank = 4;
  m.box[0] = 64, m.box[1] = static_cast<uint32_t>(heads_of_box), m.box[2] = static_cast<uint32_t>(rows_of_box),
  m.box[3] = 1;
  m.swizzle = TensorMapSwizzle::k128B;
  return m;
}
// A box row of 128 codes; the TMA fills zeros beyond the head dim.
void take_codes(TensorMapDesc& m) {
  m.type = TensorMapType::kUint8;
  m.box[0] = kernels::kRawPitch;
}
// An axis of one element gets a stride that the driver takes: its own is never used, and the driver would refuse some.
void set_axis(TensorMapDesc& m, int axis, int64_t extent, int64_t stride_bytes) {
  m.shape[axis] = static_cast<uint64_t>(std::max<int64_t>(1, extent));
  m.stride_bytes[axis] = static_cast<uint64_t>(extent > 1 ? stride_bytes : kAlignment);
}

// A plane of an x-packed cache. The caller fills in the two inner axes and the groups of tokens.
TensorMapDesc start_packed_map(const Problem& p, const KvPlane& v, TensorMapSwizzle swizzle) {
  TensorMapDesc m = start_map(p, v.data, 1, 1);
  if (v.element_size == 1) m.type = TensorMapType::kUint8;
  m.rank = 5;
  m.swizzle = swizzle;
  m.box[4] = 1;
  set_axis(m, 3, p.heads_kv, v.head_stride * v.element_size);
  set_axis(m, 4, p.cache.num_pages, v.page_stride * v.element_size);
  return m;
}
uint32_t padded_channels(int64_t head_dim, int64_t unit) { return static_cast<uint32_t>(round_up(head_dim, unit)); }

}  // namespace

bool strides_fit(const RowView& v) {
  const int64_t size = v.element_size;
  return v.dim_stride == 1 && v.row_stride * size % kAlignment == 0 && v.head_stride * size % kAlignment == 0 &&
         v.batch_stride * size % kAlignment == 0;
}
bool strides_fit(const KvPlane& v, int64_t unit) {
  const int64_t size = v.element_size;
  return v.contiguous && v.inner_stride == 1 && v.page_stride * size % unit == 0 && v.slot_stride * size % unit == 0 &&
         v.head_stride * size % unit == 0;
}

// [batch or 1, rows, heads, channels].
TensorMapDesc row_map(const Problem& p, const RowView& v, int64_t heads, int64_t head_dim, int rows_of_box,
                      int heads_of_box) {
  TensorMapDesc m = start_map(p, v.data, rows_of_box, heads_of_box);
  const int64_t size = v.element_size;
  if (size == 1) take_codes(m);
  m.shape[0] = static_cast<uint64_t>(head_dim);
  set_axis(m, 1, heads, v.head_stride * size);
  set_axis(m, 2, v.rows_per_batch > 0 ? v.rows_per_batch : v.rows, v.row_stride * size);
  set_axis(m, 3, v.rows_per_batch > 0 ? v.rows / v.rows_per_batch : 1, v.batch_stride * size);
  return m;
}

// [pages or sequences, slots, heads, channels]; 8-bit elements are copied as they are.
TensorMapDesc cache_map(const Problem& p, const KvPlane& v, int64_t head_dim, int rows_of_box) {
  TensorMapDesc m = start_map(p, v.data, rows_of_box, 1);
  const int64_t size = v.element_size;
  if (size == 1) {
    take_codes(m);
    m.swizzle = TensorMapSwizzle::kNone;
  }
  m.shape[0] = static_cast<uint64_t>(head_dim);
  set_axis(m, 1, p.heads_kv, v.head_stride * size);
  set_axis(m, 2, p.cache.page_size, v.slot_stride * size);
  set_axis(m, 3, p.cache.num_pages, v.page_stride * size);
  return m;
}

TensorMapDesc xpacked_k_map(const Problem& p, int tokens_of_box) {
  const KvPlane& k = p.cache.k;
  TensorMapDesc m = start_packed_map(p, k, TensorMapSwizzle::kNone);
  m.shape[0] = m.box[0] = static_cast<uint32_t>(8 * k.pack);
  set_axis(m, 1, p.head_dim_qk / k.pack, k.outer_stride * k.element_size);
  set_axis(m, 2, p.cache.page_size / 8, 128);
  m.box[1] = padded_channels(p.head_dim_qk, 16) / static_cast<uint32_t>(k.pack);
  m.box[2] = static_cast<uint32_t>(tokens_of_box / 8);
  return m;
}
TensorMapDesc xpacked_v_map(const Problem& p, int tokens_of_box) {
  const KvPlane& v = p.cache.v;
  TensorMapDesc m = start_packed_map(p, v, TensorMapSwizzle::k32B);
  m.shape[0] = m.box[0] = 16;
  set_axis(m, 1, p.head_dim_v, v.inner_stride * 2);
  set_axis(m, 2, p.cache.page_size / 16, 32);
  m.box[1] = padded_channels(p.head_dim_v, 32);
  m.box[2] = static_cast<uint32_t>(tokens_of_box / 16);
  return m;
}
TensorMapDesc xpacked_quantized_v_map(const Problem& p, int tokens_of_box) {
  const KvPlane& v = p.cache.v;
  TensorMapDesc m = start_packed_map(p, v, TensorMapSwizzle::kNone);
  // A box that is a whole page with contiguous channels is copied as rows of 256 bytes: fewer, longer rows.
  const bool whole = tokens_of_box == p.cache.page_size && tokens_of_box == v.inner_stride;
  const int64_t row = whole ? 256 : tokens_of_box, channels_of_row = row / tokens_of_box;
  m.shape[0] = static_cast<uint64_t>(whole ? row : p.cache.page_size);
  m.box[0] = static_cast<uint32_t>(row);
  set_axis(m, 1, p.head_dim_v / channels_of_row, channels_of_row * v.inner_stride);
  set_axis(m, 2, 1, 0);
  m.box[1] = padded_channels(p.head_dim_v, 32) / static_cast<uint32_t>(channels_of_row);
  m.box[2] = 1;
  return m;
}

}  // namespace attune::cuda::attention
