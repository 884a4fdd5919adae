// SPDX-License-Identifier: Apache-2.0
#include "cache_rows.h"

#include "number.h"
#include "tensors.h"

namespace attune::cases {

int64_t page_size_of(const attune_kv_cache& cache) {
  if (cache.format == ATTUNE_KV_MLA_584) return cache.page_size;
  return cache.k.shape[cache.layout == ATTUNE_KV_HND ? 2 : cache.layout == ATTUNE_KV_XPACKED ? 3 : 1];
}

std::vector<int64_t> plane_shape(int32_t layout, bool is_v, int64_t pages, int64_t page_size, int64_t heads,
                                 int64_t dim, int64_t x) {
  if (layout == ATTUNE_KV_NHD) return {pages, page_size, heads, dim};
  if (layout == ATTUNE_KV_HND) return {pages, heads, page_size, dim};
  if (is_v) return {pages, heads, dim, page_size};
  return {pages, heads, dim / x, page_size, x};
}

void* pool_element(const attune_kv_cache& cache, bool is_v, int64_t page, int64_t offset, int64_t head, int64_t d) {
  const attune_tensor& t = is_v ? cache.v : cache.k;
  switch (cache.layout) {
    case ATTUNE_KV_NHD:
      return element_at(t, {page, offset, head, d});
    case ATTUNE_KV_HND:
      return element_at(t, {page, head, offset, d});
    default:
      if (is_v) return element_at(t, {page, head, d, offset});
      return element_at(t, {page, head, d / t.shape[4], offset, d % t.shape[4]});
  }
}

PackedRow packed_row(const attune_kv_cache& cache, int64_t page, int64_t offset) {
  std::byte* const first = static_cast<std::byte*>(cache.k.data) + page * cache.k.stride[0];
  if (cache.format == ATTUNE_KV_MLA_656) {
    std::byte* const row = first + offset * cache.k.stride[1];
    return {row, row + 512, row + 528, 512, 128, 656, 0};
  }
  std::byte* const row = first + offset * 576;
  return {row, first + cache.page_size * 576 + offset * 8, row + 448, 448, 64, 576, 8};
}

const std::vector<NamedMode>& scale_modes() {
  static const std::vector<NamedMode> modes = {{"none", ScaleMode::kNone},
                                               {"tensor", ScaleMode::kTensor},
                                               {"head", ScaleMode::kHead},
                                               {"token", ScaleMode::kTokenHead}};
  return modes;
}

bool takes_scales(attune_dtype dtype, ScaleMode mode) {
  return mode == ScaleMode::kNone ? dtype != ATTUNE_INT8 : element_size(dtype) == 1;
}
bool scales_by_token(ScaleMode mode) { return mode == ScaleMode::kTokenHead; }
int64_t channels_of_scale(ScaleMode, int64_t dim) { return dim; }
int64_t scale_bytes_of_row(ScaleMode mode, int64_t dim) {
  return scales_by_token(mode) ? 4 * ceil_div(dim, channels_of_scale(mode, dim)) : 0;
}
bool scales_channels(attune_kv_format format, ScaleMode) { return format != ATTUNE_KV_PLAIN; }

std::vector<int64_t> scale_shape(ScaleMode mode, int32_t layout, int64_t pages, int64_t page_size, int64_t heads,
                                 int64_t /*dim*/) {
  if (mode == ScaleMode::kTensor) return {1};
  if (mode == ScaleMode::kHead) return {heads};
  if (layout == ATTUNE_KV_NHD) return {pages, page_size, heads};
  return {pages, heads, page_size};
}

ScaleMode scale_mode(const attune_tensor& scales) {
  if (scales.dtype == ATTUNE_DTYPE_NONE) return ScaleMode::kNone;
  if (scales.rank == 1) return scales.shape[0] == 1 ? ScaleMode::kTensor : ScaleMode::kHead;
  return ScaleMode::kTokenHead;
}

void* scale_element(const attune_kv_cache& cache, bool is_v, int64_t page, int64_t offset, int64_t head,
                    int64_t /*d*/) {
  const attune_tensor& scales = is_v ? cache.v_scale : cache.k_scale;
  if (scales.rank == 1) return element_at(scales, {scales.shape[0] == 1 ? 0 : head});
  return cache.layout == ATTUNE_KV_NHD ? element_at(scales, {page, offset, head})
                                       : element_at(scales, {page, head, offset});
}

ScaleMode draw_scales(Random& r, attune_dtype dtype) {
  const auto last = static_cast<int64_t>(scale_modes().size()) - 1;
  const ScaleMode mode = scale_modes()[static_cast<size_t>(r.integer(0, last))].mode;
  return takes_scales(dtype, mode) ? mode : ScaleMode::kTokenHead;
}

}  // namespace attune::cases
