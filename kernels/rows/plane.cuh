// SPDX-License-Identifier: Apache-2.0
// Addresses of rows, and runs of channels of cached rows, for the kernels that move rows.
#pragma once

#include "rows/rows_params.h"
#include "tile/prologue_row.cuh"

namespace attune::rows {

using kernels::RowPlane;
using kernels::RowScale;
using kernels::RowTensor;

// What the host compiles a kernel for. 0 as a type: known at run time.
constexpr int kWidth = ATTUNE_WIDTH;       // channels of a run
constexpr int kLanes = ATTUNE_LANES;       // threads of a row
constexpr int kUnits = ATTUNE_UNITS;       // of two runs, of one thread
constexpr int kRows = ATTUNE_ROWS;         // that a thread has on their way
constexpr bool kVector = kWidth == 8;      // all runs follow each other in memory and are aligned
constexpr int kRowType = ATTUNE_ROW_TYPE;  // of dense rows that are read (store) or written (fetch)
constexpr int kOutType = ATTUNE_OUT_TYPE;  // of outputs of store
constexpr int kCacheType = ATTUNE_CACHE_TYPE;
constexpr int kFormat = ATTUNE_FORMAT;  // 0: plain; else MlaRow's
constexpr int kScales = ATTUNE_SCALES;  // RowScale::mode, or kScalesAtRunTime

static_assert(kWidth == 8 || kWidth == 1, "runs of 8 that are aligned, or single channels");
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16 || kLanes == 32, "a row's threads lie in one warp");
static_assert(kFormat == 0 || kLanes == 32, "a warp takes a packed row, for the sake of its groups");

__device__ __forceinline__ constexpr int type_of(int compiled, int at_run_time) {
  return compiled != 0 ? compiled : at_run_time;
}
__device__ __forceinline__ int scale_mode(const RowScale& s) {
  return kScales == kernels::kScalesAtRunTime ? s.mode : kScales;
}

__device__ __forceinline__ char* row_at(const RowTensor& t, long long outer, long long inner, int head) {
  return t.data + outer * t.outer_stride + inner * t.row_stride + head * t.head_stride;
}
__device__ __forceinline__ char* row_at(const RowPlane& t, long long page, long long offset, int head) {
  return t.data + page * t.page_stride + offset * t.slot_stride + head * t.head_stride;
}
__device__ __forceinline__ float* scale_at(const RowScale& t, long long page, long long offset, int head) {
  return reinterpret_cast<float*>(t.data + page * t.page_stride + offset * t.slot_stride + head * t.head_stride);
}

__device__ __forceinline__ tile::RawRun<kWidth> load(const RowTensor& t, int dtype, const char* row, int channel) {
  return tile::load_run<kWidth>(dtype, row + channel * t.channel_stride, t.channel_stride, kVector);
}
__device__ __forceinline__ void store(const RowTensor& t, int dtype, char* row, int channel, const float (&x)[kWidth]) {
  tile::store_run<kWidth>(dtype, tile::encode_run<kWidth>(dtype, x), row + channel * t.channel_stride, t.channel_stride,
                          kVector);
}

// Runs of a plain cached row. A run of 8 lies in one pack.
__device__ __forceinline__ long long channel_at(const RowPlane& t, int channel) {
  const int pack = channel / t.pack;
  return pack * t.outer_stride + (channel - pack * t.pack) * t.inner_stride;
}
__device__ __forceinline__ tile::RawRun<kWidth> load(const RowPlane& t, int dtype, const char* row, int channel) {
  return tile::load_run<kWidth>(dtype, row + channel_at(t, channel), t.inner_stride, kVector);
}
__device__ __forceinline__ void store(const RowPlane& t, int dtype, char* row, int channel, const float (&x)[kWidth]) {
  tile::store_run<kWidth>(dtype, tile::encode_run<kWidth>(dtype, x), row + channel_at(t, channel), t.inner_stride,
                          kVector);
}

}  // namespace attune::rows
