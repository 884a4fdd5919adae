// SPDX-License-Identifier: Apache-2.0
// The scales of an 8-bit cache.
#pragma once

#include "prefill/config.cuh"

namespace attune::prefill {

constexpr int kScaleByToken = 3;  // of KvScale::mode

// The dequantization scale of a cached key.
__device__ __forceinline__ float scale_of(const WorkTileParams& p, const WorkTile& t, int kv_head, int key,
                                          bool values) {
  const kernels::KvScale& scale = values ? p.v_scale : p.k_scale;
  if (scale.mode == 0) return 1.0f;
  if (scale.mode == 1) return scale.data[0];
  if (scale.mode == 2) return scale.data[kv_head * scale.head_stride];
  const Slot s = find_slot(p, t.batch, key, values);
  if (!is_there(p, s.page)) return 0.0f;
  return scale.data[s.page * scale.page_stride + s.slot * scale.slot_stride + kv_head * scale.head_stride];
}

}  // namespace attune::prefill
