// SPDX-License-Identifier: Apache-2.0
// Reads tables of int32: lengths and offsets of sequences, page tables.
#pragma once

#include "common/attention_params.h"

namespace attune::common {

using kernels::AttentionParams;

__device__ __forceinline__ int int_at(const kernels::IntTable& t, long long i) { return t.data[i * t.column_stride]; }
__device__ __forceinline__ int int_at(const kernels::IntTable& t, long long i, long long j) {
  return t.data[i * t.row_stride + j * t.column_stride];
}

__device__ __forceinline__ int clamp_int(long long x, long long low, long long high) {
  return static_cast<int>(x < low ? low : x > high ? high : x);
}

}  // namespace attune::common
