// SPDX-License-Identifier: Apache-2.0
// Addresses of rows, and runs of channels of cached rows, for the kernels that move rows.
#pragma once

#include "common/prologue_row.cuh"
#include "rows/rows_params.h"

namespace attune::rows {

using kernels::KvPlane;
using kernels::RowTensor;
using common::Unit;

// The configuration, set by the host. Type 0: known at run time.
constexpr int kWidth = ATTUNE_WIDTH;       // channels of a run
constexpr int kLanes = ATTUNE_LANES;       // threads of a row
constexpr int kUnits = ATTUNE_UNITS;       // units of a thread; a unit has two runs
constexpr int kRows = ATTUNE_ROWS;         // rows in flight in a thread
constexpr bool kVector = kWidth == 8;      // all runs are contiguous and aligned
constexpr int kRowType = ATTUNE_ROW_TYPE;  // of dense rows that are read (store) or written (fetch)
constexpr int kOutType = ATTUNE_OUT_TYPE;  // of outputs of store
constexpr int kCacheType = ATTUNE_CACHE_TYPE;
constexpr int kFormat = ATTUNE_FORMAT;     // 0: plain; else MlaRow's
constexpr int kScales = ATTUNE_SCALES;     // KvScale::mode, or kScalesAtRunTime
constexpr int kHeadDim = ATTUNE_HEAD_DIM;  // of K and V; 0: known at run time

static_assert(kWidth == 8 || kWidth == 1, "runs of 8 that are aligned, or single channels");
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16 || kLanes == 32, "a row's threads are in one warp");
static_assert(kFormat == 0 || kLanes == 32, "a warp takes a packed row, whose scale groups it reduces");

__device__ __forceinline__ constexpr int type_of(int compiled, int at_run_time) {
  return compiled != 0 ? compiled : at_run_time;
}
__device__ __forceinline__ ScaleMode scale_mode(const KvScale& s) {
  return kScales == kernels::kScalesAtRunTime ? s.mode : static_cast<ScaleMode>(kScales);
}

__device__ __forceinline__ char* row_at(const RowTensor& t, long long outer, long long inner) {
  return t.data + outer * t.outer_stride + inner * t.row_stride;
}
__device__ __forceinline__ char* row_at(const KvPlane& t, long long page, long long offset) {
  return t.data + page * t.page_stride + offset * t.slot_stride;
}
__device__ __forceinline__ char* scale_at(const KvScale& t, long long page, long long offset) {
  return reinterpret_cast<char*>(t.at(page, offset, 0));
}

// The byte offset of a channel in its row.
__device__ __forceinline__ long long channel_at(const RowTensor& t, int dtype, int channel) {
  return kVector ? channel * common::element_size(dtype) : channel * t.channel_stride;
}
__device__ __forceinline__ long long channel_at(const KvPlane& t, int dtype, int channel) {
  if (kVector) return channel * common::element_size(dtype);
  return t.element(channel) * common::element_size(dtype);
}

// Tells the compiler that an address loaded from shared memory points to global memory.
template <class Pointer>
__device__ __forceinline__ Pointer global(Pointer at) {
  __builtin_assume(__isGlobal(at));
  return at;
}
template <class Where>
__device__ __forceinline__ common::RawRun<kWidth> load(const Where& t, int dtype, const char* row, int channel) {
  return common::load_run<kWidth>(dtype, global(row + channel_at(t, dtype, channel)), 0, kVector);
}
template <class Where>
__device__ __forceinline__ void store(const Where& t, int dtype, char* row, int channel,
                                      const common::RawRun<kWidth>& codes) {
  common::store_run<kWidth>(dtype, codes, global(row + channel_at(t, dtype, channel)), 0, kVector);
}

// The channels of a thread's unit u without RoPE. first -1: none; second -1: no second run. In plain rows threads have
// neighbouring runs. In packed rows both runs of a unit are neighbours, so that a unit lies in one scale group.
__device__ __forceinline__ Unit plain_unit(int head_dim, int lane, int u) {
  const int dim = kHeadDim != 0 ? kHeadDim : head_dim;
  const int first = kFormat == 0 ? (u * 2 * kLanes + lane) * kWidth : (u * kLanes + lane) * 2 * kWidth;
  const int second = first + (kFormat == 0 ? kLanes * kWidth : kWidth);
  // No checks are needed if the threads of a row have exactly its channels.
  constexpr bool kExact = kHeadDim == kUnits * kLanes * 2 * kWidth;
  return {kExact || first < dim ? first : -1, kExact || second < dim ? second : -1, -1};
}

// The tokens and rows that a thread takes: a block takes several tokens at a time, and several rows of each.
// Neighbouring groups of kLanes threads take neighbouring rows.
struct ThreadRows {
  int lane;    // the thread's number in its row
  int token;   // the thread's first token
  int tokens;  // step to the thread's next token
  int row;     // the thread's first row of a token
  int rows;    // step to the thread's next row
  __device__ __forceinline__ explicit ThreadRows(const kernels::RowTokens& t) {
    const int group = threadIdx.x / kLanes;
    lane = threadIdx.x % kLanes;
    rows = 1 << t.groups_shift;
    row = group & (rows - 1);
    token = group >> t.groups_shift;
    tokens = (kernels::kRowsThreads / kLanes) >> t.groups_shift;
  }
  // Advances to the thread's next row of the token, or to its next token.
  __device__ __forceinline__ void advance(int rows_of_token, int& at_token, int& at_row) const {
    at_row += rows;
    if (at_row - row < rows_of_token) return;
    at_row = row;
    at_token += tokens;
  }
};

}  // namespace attune::rows
