// SPDX-License-Identifier: Apache-2.0
// The scales of a cache's codes: x = code * scale. The host checks and fills it (src/core/kv_cache.cpp); kernels that
// read or write caches take it as it is. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "common/kinds.h"

namespace attune {

struct KvScale {
  using Mode = ScaleMode;
  float* data = nullptr;
  long long page_stride = 0, slot_stride = 0, head_stride = 0;  // in elements
  ScaleMode mode = ScaleMode::kNone;

  // Computed and written with the rows; else only read.
  ATTUNE_SHARED_FUNCTION bool by_token() const { return mode == ScaleMode::kTokenHead; }
  ATTUNE_SHARED_FUNCTION float* at(long long page, long long slot, long long head) const {
    return data + page * page_stride + slot * slot_stride + head * head_stride;
  }
};

namespace kernels {
using attune::KvScale;
}

}  // namespace attune
