// SPDX-License-Identifier: Apache-2.0
// The epilogue of one row: sinks, normalisation, lse, max_logits.
#pragma once

#include "common/element.cuh"
#include "common/int_table.cuh"
#include "common/work_tile_params.h"
#include "ptx/math.cuh"

namespace attune::common {

using kernels::AttentionParams;

// The first row of q of a sequence in a varlen batch; otherwise 0.
__device__ __forceinline__ long long query_begin(const AttentionParams& p, int batch) {
  return p.cu_seqlens_q.data != nullptr ? clamp_int(int_at(p.cu_seqlens_q, batch), 0, p.total_q)
                                        : 0;
}

// The element offset of (sequence, query, head) in a tensor with these strides.
__device__ __forceinline__ long long row_offset(const AttentionParams& p, int batch, long long q_begin, int query,
                                                int head, long long batch_stride, long long row_stride,
                                                long long head_stride) {
  return (p.cu_seqlens_q.data != nullptr ? q_begin * row_stride : batch * batch_stride) + query * row_stride +
         head * head_stride;
}

// The element offset of a work tile's row in `out`.
__device__ __forceinline__ long long out_at(const kernels::WorkTileParams& p, const kernels::WorkTile& t, int token,
                                            int head) {
  return row_offset(p, t.batch, t.q_begin, token, head, p.out_batch_stride, p.out_row_stride, p.out_head_stride);
}

// Returns the factor that normalises O of a row with row_max `max` (base 2) and row_sum `sum`: 1 / sum, with sinks and
// out_scale. stores: also stores lse and max_logits.
__device__ __forceinline__ float finish_row(const AttentionParams& p, int batch, long long q_begin, int query, int head,
                                            float max, float sum, bool stores = true) {
  const float infinity = ptx::infinity();
  const bool empty = max == -infinity && sum == 0;
  if (sum != sum && max != infinity) max = sum;  // fmaxf ignores NaN
  if (stores && p.lse != nullptr) {
    p.lse[row_offset(p, batch, q_begin, query, head, p.lse_batch_stride, p.lse_row_stride, p.lse_head_stride)] =
        empty ? -infinity : (max + log2f(sum)) * kLn2;
  }
  if (stores && p.max_logits != nullptr) {
    p.max_logits[row_offset(p, batch, q_begin, query, head, p.max_batch_stride, p.max_row_stride, p.max_head_stride)] =
        max * kLn2;
  }
  if (empty) return 0.0f;
  float factor = 1.0f / sum;
  if (p.sinks != nullptr) {
    const float sink = load_element(p.sinks_dtype, p.sinks + head * p.sinks_stride, 0) * kLog2e;
    // Takes exponentials relative to the larger of max and sink, so that none overflows. With an infinite sink the row
    // is 0.
    const float top = fmaxf(max, sink);
    factor = sink == infinity ? 0.0f : exp2f(max - top) / (sum * exp2f(max - top) + exp2f(sink - top));
    if (sink != sink) factor = sink;
  }
  return p.out_scale != nullptr ? factor * *p.out_scale : factor;
}

}  // namespace attune::common
