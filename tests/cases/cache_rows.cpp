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

const std::map<std::string, ScaleMode>& scale_modes() {
  static const std::map<std::string, ScaleMode> modes = {{"none", ScaleMode::kNone},
                                                         {"tensor", ScaleMode::kTensor},
                                                         {"head", ScaleMode::kHead},
                                                         {"token", ScaleMode::kTokenHead}};
  return modes;
}

bool scales_by_token(ScaleMode mode) { return mode == ScaleMode::kTokenHead; }
int64_t scale_bytes_of_row(ScaleMode mode) { return mode == ScaleMode::kTokenHead ? 4 : 0; }

std::vector<int64_t> scale_shape(ScaleMode mode, int32_t layout, int64_t pages, int64_t page_size, int64_t heads) {
  if (mode == ScaleMode::kTensor) return {1};
  if (mode == ScaleMode::kHead) return {heads};
  if (layout == ATTUNE_KV_NHD) return {pages, page_size, heads};
  return {pages, heads, page_size};
}

void* scale_element(const attune_kv_cache& cache, bool is_v, int64_t page, int64_t offset, int64_t head) {
  const attune_tensor& scales = is_v ? cache.v_scale : cache.k_scale;
  if (scales.rank == 1) return element_at(scales, {scales.shape[0] == 1 ? 0 : head});
  return cache.layout == ATTUNE_KV_NHD ? element_at(scales, {page, offset, head})
                                       : element_at(scales, {page, head, offset});
}

ScaleMode draw_scales(Random& r, attune_dtype dtype) {
  const auto mode = r.pick<ScaleMode>({ScaleMode::kNone, ScaleMode::kTensor, ScaleMode::kHead, ScaleMode::kTokenHead});
  return dtype == ATTUNE_INT8 && mode == ScaleMode::kNone ? ScaleMode::kTokenHead : mode;
}

}  // namespace attune::cases
