// SPDX-License-Identifier: Apache-2.0
// The scales of a cache's codes: x = code * scale. The host checks and fills a KvScale (src/core/kv_cache.cpp), and
// kernels use it unchanged. Only src/cpu/kv_rows.cpp and kernels/common/kv_codec.cuh know what a mode means for a row.
// Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/shared_function.h"

namespace attune {

// The granularity of a scale.
enum class ScaleMode : int { kNone, kTensor, kHead, kTokenHead };

namespace use {
// Values of the coverage axis (core/kernel.h): bit i is ScaleMode i. kCodecScales: the modes that the codecs have.
enum KvScales : unsigned { kNoScale = 1, kPerTensor = 2, kPerHead = 4, kPerTokenHead = 8, kCodecScales = 15 };
#define ATTUNE_KV_SCALE_NAMES "none", "per tensor", "per head", "per token and head"
}  // namespace use

struct KvScale {
  using Mode = ScaleMode;
  float* data = nullptr;
  long long page_stride = 0, slot_stride = 0, head_stride = 0;  // in elements
  ScaleMode mode = ScaleMode::kNone;

  // Whether scales are computed and written with the rows. Otherwise they are only read.
  ATTUNE_SHARED_FUNCTION bool by_token() const { return mode == ScaleMode::kTokenHead; }
  ATTUNE_SHARED_FUNCTION float* at(long long page, long long slot, long long head) const {
    return data + page * page_stride + slot * slot_stride + head * head_stride;
  }
};

// ATTUNE_TOKEN_SCALES of K and V. 0: one factor for the whole call; 1: one for each key.
ATTUNE_SHARED_FUNCTION int token_scales(const KvScale& k, const KvScale& v) {
  return k.by_token() || v.by_token() ? 1 : 0;
}
// How many token scales a row of K or V has, the larger of both.
ATTUNE_SHARED_FUNCTION int scales_of_key(int token_scales, int /*head_dim_qk*/, int /*head_dim_v*/) {
  return token_scales;
}

}  // namespace attune
