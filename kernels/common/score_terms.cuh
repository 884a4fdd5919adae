// SPDX-License-Identifier: Apache-2.0
// Score terms that are read from tables: biases and T5.
#pragma once

#include "common/attention_params.h"
#include "common/element.cuh"
#include "common/kinds.h"
#include "ptx/math.cuh"

namespace attune::common {

__device__ __forceinline__ float bias_of(const kernels::BiasTable& t, int head, int row, int column) {
  if (t.data == nullptr || row < 0 || row >= t.rows || column < 0 || column >= t.columns) return 0.0f;
  return load_element(t.dtype, t.data + head * t.head_stride + row * t.row_stride + column * t.column_stride, 0);
}

// relative: the position of the key minus that of the query.
__device__ __forceinline__ int t5_bucket(const kernels::T5Table& t, int relative) {
  const int offset = t.bidirectional && relative > 0 ? t.buckets : 0;
  const int distance = relative < 0 ? -relative : t.bidirectional ? relative : 0;
  if (distance < t.exact) return offset + distance;
  if (distance >= t.max_distance) return offset + t.buckets - 1;
  int bucket = t.exact;
  for (int i = 0; i < t.steps && distance >= t.first[i]; ++i) ++bucket;
  return offset + bucket;
}

// The sum of the bias terms in natural units, for query `query` of a sequence whose query 0 is at first_position. In
// base 2 the lowest numbers would be -inf, which hides a key: they become the lowest that is not.
template <unsigned kScore>
__device__ __forceinline__ float table_terms(const kernels::AttentionParams& p, int head, int query, int first_position,
                                             int key, int distance) {
  float x = 0;
  if constexpr ((kScore & use::kBias) != 0) {
    x += bias_of(p.bias, head, first_position + query, key);
    x += bias_of(p.new_token_bias, 0, query, key - first_position);
  }
  if constexpr ((kScore & use::kT5) != 0) {
    x += load_element(p.t5.dtype, p.t5.data + head * p.t5.head_stride + t5_bucket(p.t5, -distance) * p.t5.bucket_stride,
                      0);
  }
  constexpr float kLowest = -2.2e38f;
  return x < kLowest && x != -ptx::infinity() ? kLowest : x;
}

}  // namespace attune::common
