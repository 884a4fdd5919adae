// SPDX-License-Identifier: Apache-2.0
// Addresses of rows, and runs of channels of cached rows, for the kernels that move rows.
#pragma once

#include "rows/rows_params.h"
#include "tile/prologue_row.cuh"

namespace attune::rows {

using kernels::RowPlane;
using kernels::RowScale;
using kernels::RowTensor;
using tile::Unit;

// What the host compiles a kernel for. 0 as a type: known at run time.
constexpr int kWidth = ATTUNE_WIDTH;       // channels of a run
constexpr int kLanes = ATTUNE_LANES;       // threads of a row
constexpr int kUnits = ATTUNE_UNITS;       // of two runs, of one thread
constexpr int kRows = ATTUNE_ROWS;         // that a thread has on their way
constexpr bool kVector = kWidth == 8;      // all runs follow each other in memory and are aligned
constexpr int kRowType = ATTUNE_ROW_TYPE;  // of dense rows that are read (store) or written (fetch)
constexpr int kOutType = ATTUNE_OUT_TYPE;  // of outputs of store
constexpr int kCacheType = ATTUNE_CACHE_TYPE;
constexpr int kFormat = ATTUNE_FORMAT;     // 0: plain; else MlaRow's
constexpr int kScales = ATTUNE_SCALES;     // RowScale::mode, or kScalesAtRunTime
constexpr int kHeadDim = ATTUNE_HEAD_DIM;  // of K and V; 0: known at run time

static_assert(kWidth == 8 || kWidth == 1, "runs of 8 that are aligned, or single channels");
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16 || kLanes == 32, "a row's threads lie in one warp");
static_assert(kFormat == 0 || kLanes == 32, "a warp takes a packed row, for the sake of its groups");

__device__ __forceinline__ constexpr int type_of(int compiled, int at_run_time) {
  return compiled != 0 ? compiled : at_run_time;
}
__device__ __forceinline__ int scale_mode(const RowScale& s) {
  return kScales == kernels::kScalesAtRunTime ? s.mode : kScales;
}

__device__ __forceinline__ char* row_at(const RowTensor& t, long long outer, long long inner) {
  return t.data + outer * t.outer_stride + inner * t.row_stride;
}
__device__ __forceinline__ char* row_at(const RowPlane& t, long long page, long long offset) {
  return t.data + page * t.page_stride + offset * t.slot_stride;
}
__device__ __forceinline__ char* scale_at(const RowScale& t, long long page, long long offset) {
  return t.data + page * t.page_stride + offset * t.slot_stride;
}

// Where a channel lies in its row.
__device__ __forceinline__ long long channel_at(const RowTensor& t, int dtype, int channel) {
  return kVector ? channel * tile::element_size(dtype) : channel * t.channel_stride;
}
__device__ __forceinline__ long long channel_at(const RowPlane& t, int dtype, int channel) {
  if (kVector) return channel * tile::element_size(dtype);
  const int pack = channel / t.pack;
  return pack * t.outer_stride + (channel - pack * t.pack) * t.inner_stride;
}

// Addresses come out of shared memory, so that the compiler does not know what they point at.
template <class Pointer>
__device__ __forceinline__ Pointer global(Pointer at) {
  __builtin_assume(__isGlobal(at));
  return at;
}
template <class Where>
__device__ __forceinline__ tile::RawRun<kWidth> load(const Where& t, int dtype, const char* row, int channel) {
  return tile::load_run<kWidth>(dtype, global(row + channel_at(t, dtype, channel)), 0, kVector);
}
template <class Where>
__device__ __forceinline__ void store(const Where& t, int dtype, char* row, int channel,
                                      const tile::RawRun<kWidth>& codes) {
  tile::store_run<kWidth>(dtype, codes, global(row + channel_at(t, dtype, channel)), 0, kVector);
}

// Channels of unit u of a thread where nothing turns; first -1: none, second -1: no second run. The threads of a plain
// row have neighbouring runs at a time; those of a packed one have units of neighbours, for the sake of its groups.
__device__ __forceinline__ Unit plain_unit(int head_dim, int lane, int u) {
  const int dim = kHeadDim != 0 ? kHeadDim : head_dim;
  const int first = kFormat == 0 ? (u * 2 * kLanes + lane) * kWidth : (u * kLanes + lane) * 2 * kWidth;
  const int second = first + (kFormat == 0 ? kLanes * kWidth : kWidth);
  // Where the threads of a row have just its channels, nothing is left to ask.
  constexpr bool kExact = kHeadDim == kUnits * kLanes * 2 * kWidth;
  return {kExact || first < dim ? first : -1, kExact || second < dim ? second : -1, -1};
}

// Threads of a block in two: which of the tokens that it takes at a time, and which rows of the token. Neighbouring
// threads have neighbouring rows.
struct Turn {
  int lane;    // within the row
  int token;   // first of the thread's
  int tokens;  // from one to the next
  int row;     // first of the thread's
  int rows;    // from one to the next
  __device__ __forceinline__ explicit Turn(const kernels::RowTokens& t) {
    const int group = threadIdx.x / kLanes;
    lane = threadIdx.x % kLanes;
    rows = 1 << t.groups_shift;
    row = group & (rows - 1);
    token = group >> t.groups_shift;
    tokens = (kernels::kRowsThreads / kLanes) >> t.groups_shift;
  }
  // To the thread's next row: of the token, or of its next token.
  __device__ __forceinline__ void advance(int rows_of_token, int& at_token, int& at_row) const {
    at_row += rows;
    if (at_row - row < rows_of_token) return;
    at_row = row;
    at_token += tokens;
  }
};

}  // namespace attune::rows
