// SPDX-License-Identifier: Apache-2.0
// What host and device share of the kernels that move rows: store (append, quantise, qkv_prepare), fetch (dequantise,
// gather) and merge. Strides are in bytes. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/prologue_params.h"
#include "common/row_cache.h"

namespace attune::kernels {

constexpr int kRowsThreads = 256;    // of a block
constexpr int kMaxTileTokens = 128;  // tokens that a block takes
constexpr int kScalesAtRunTime = 9;  // ATTUNE_SCALES: look at KvScale::mode

// The rows, and the sequences or slots of their tokens.
struct RowTokens {
  long long total;           // rows
  long long rows_per_outer;  // 0: no outer axis
  int tile;                  // tokens of a block
  int groups_shift;          // log2 of how many rows of a token a block takes at a time
  // By slot: slots[i], or i if slots is null.
  int by_slots;
  const long long* slots;
  long long slot_stride;  // in elements
  // By sequence.
  int batch;
  long long fixed;  // rows of each sequence where there is no cu_seqlens
  IntTable cu_seqlens, seqused;
  const unsigned char* finished;
  long long finished_stride;
  int clamp_used;  // qkv_prepare: seqused is clamped to the capacity
};

struct StoreParams {
  RowTokens tokens;
  RowTensor in[3], out[3];  // q, k, v
  int heads_q, heads_kv, head_dim_qk, head_dim_v;
  int append;  // k (and v) are written to the cache
  int has_v;   // rows of v are written to the cache too
  RowCache cache;
  PrologueParams prologue;
};

struct FetchParams {
  RowTokens tokens;
  RowTensor k, v;  // v.data null: V is part of K
  int heads, head_dim_qk, head_dim_v;
  RowCache cache;
};

struct MergeParams {
  long long rows, parts;
  int heads, head_dim;
  RowTensor in, out;  // of partial result 0; no outer axis
  long long in_part_stride;
  const char* in_lse;
  long long in_lse_part_stride, in_lse_row_stride, in_lse_head_stride;
  char* lse;  // null: not wanted
  long long lse_row_stride, lse_head_stride;
  const char* sinks;  // null: none
  long long sinks_stride;
  int sinks_dtype;
  const float* out_scale;  // null: 1
};

}  // namespace attune::kernels
