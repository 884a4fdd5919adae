// SPDX-License-Identifier: Apache-2.0
// What host and device share of the kernels that move rows: store (append, quantise, qkv_prepare), fetch (dequantise,
// gather) and merge. Compiled by NVRTC and by the host's compiler; no standard headers. Strides are in bytes.
#pragma once

#include "tile/prologue_params.h"

namespace attune::kernels {

constexpr int kRowsThreads = 256;    // of a block
constexpr int kMaxTileTokens = 128;  // tokens that a block takes
constexpr int kScalesAtRunTime = 9;  // ATTUNE_SCALES: look at RowScale::mode

// Rows of q, k or v, [outer, rows_per_outer, heads, channels]; without an outer axis all rows are of outer 0.
struct RowTensor {
  char* data;  // null: absent
  long long outer_stride, row_stride, head_stride, channel_stride;
  int dtype;
};

// Rows of a cache. Channel d of (page, offset, head) is at page * page_stride + offset * slot_stride + head *
// head_stride + (d / pack) * outer_stride + (d % pack) * inner_stride. Packed formats: rows of bytes.
struct RowPlane {
  char* data;
  long long page_stride, slot_stride, head_stride, outer_stride, inner_stride;
  int pack, dtype;
};

// x = code * scale. mode: 0 none, 1 per tensor, 2 per head, 3 per token and head, as KvScale::Mode.
struct RowScale {
  char* data;
  long long page_stride, slot_stride, head_stride;
  int mode;
};

struct RowCache {
  RowPlane k, v;
  RowScale k_scale, v_scale;
  IntList page_table, v_page_table, batch_index;
  long long num_pages, page_size, capacity;  // capacity: most tokens of a sequence
  long long ring_capacity;
  int paged;
  int power_of_two_scales;
};

// The rows, and their tokens' sequences or slots.
struct RowTokens {
  long long total;           // rows
  long long rows_per_outer;  // 0: no outer axis
  int tile;                  // tokens of a block
  int groups_shift;          // log2 of the rows of a token that a block takes at a time
  // By slot: slots[i], or i where it is null.
  int by_slots;
  const long long* slots;
  long long slot_stride;  // in elements
  // By sequence.
  int batch;
  long long fixed;  // rows of each sequence where there is no cu_seqlens
  IntList cu_seqlens, seqused;
  const unsigned char* finished;
  long long finished_stride;
  int clamp_used;  // seqused is at most the capacity: qkv_prepare
};

struct StoreParams {
  RowTokens tokens;
  RowTensor in[3], out[3];  // q, k, v
  int heads_q, heads_kv, head_dim_qk, head_dim_v;
  int append;  // k (and v) go to the cache
  int has_v;   // rows of v go to the cache too
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
  RowTensor in, out;  // of part 0; no outer axis
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
