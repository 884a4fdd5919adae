// SPDX-License-Identifier: Apache-2.0
#include "cache_scales.h"

#include "number.h"
#include "tensors.h"

namespace attune::cases {

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

void* scale_element(const attune_tensor& scales, int32_t layout, int64_t page, int64_t offset, int64_t head) {
  if (scales.rank == 1) return element_at(scales, {scales.shape[0] == 1 ? 0 : head});
  return layout == ATTUNE_KV_NHD ? element_at(scales, {page, offset, head}) : element_at(scales, {page, head, offset});
}

ScaleMode draw_scales(Random& r, attune_dtype dtype) {
  const auto mode = r.pick<ScaleMode>({ScaleMode::kNone, ScaleMode::kTensor, ScaleMode::kHead, ScaleMode::kTokenHead});
  return dtype == ATTUNE_INT8 && mode == ScaleMode::kNone ? ScaleMode::kTokenHead : mode;
}

}  // namespace attune::cases
