// SPDX-License-Identifier: Apache-2.0
// The parameters of all attention kernels. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "common/key_masks.h"
#include "common/kinds.h"
#include "common/kv_plane.h"
#include "common/kv_scale.h"
#include "common/prologue_params.h"

namespace attune::kernels {

// Rows of K or V of the new tokens, of q's type. Strides as for q, with KV heads. data null: not given.
struct NewRows {
  const char* data;
  long long batch_stride, row_stride, head_stride, dim_stride;  // in elements
};

// A bias [heads][rows][columns] of a float dtype. Outside of its rows and columns it is 0. data null: not given.
struct BiasTable {
  const char* data;
  long long head_stride, row_stride, column_stride;  // in bytes
  int rows, columns, dtype;
};

// T5: a bias for each head and bucket of the distance between key and query.
constexpr int kMaxT5Steps = 64;
struct T5Table {
  const char* data;
  long long head_stride, bucket_stride;  // in bytes
  int dtype;
  int bidirectional;
  int buckets;       // in one direction
  int exact;         // each distance below this has a bucket of its own
  int max_distance;  // from this distance on, all are in the last bucket
  int steps;
  int first[kMaxT5Steps];  // the first distance of bucket exact + 1 + i
};

// A call of attention. Prefill and MLA extend it to WorkTileParams. Fields marked "decode" belong to decode alone.
struct AttentionParams {
  // Queries [batch or 1, rows, num_heads_q, head_dim_qk]. Sequence b begins at element b * batch_stride, or at
  // cu_seqlens_q[b] * row_stride.
  const char* q;
  // strides are in elements unless they say otherwise
  long long q_batch_stride, q_row_stride, q_head_stride, q_dim_stride;
  char* out;                                                            // [as q, head_dim_v]
  long long out_batch_stride, out_row_stride, out_head_stride, out_dim_stride;
  float* lse;  // as q without the last axis; null: not wanted
  long long lse_batch_stride, lse_row_stride, lse_head_stride;
  float* max_logits;
  long long max_batch_stride, max_row_stride, max_head_stride;
  IntTable cu_seqlens_q;
  long long total_q;

  NewRows new_k, new_v;  // data null: the cache holds all keys
  PrologueParams prologue;
  int append;  // decode: new tokens go to the cache

  KvPlane k, v;
  int v_is_k;  // V is the first head_dim_v channels of K
  KvScale k_scale, v_scale;
  IntTable page_table, v_page_table, batch_index, seqused_kv;
  IntTable cache_indirection, beam_prompt_length;  // decode
  const unsigned char* finished;
  long long finished_stride;
  long long num_pages;
  int page_size, page_shift;  // page_shift: log2, or -1
  int capacity;               // most tokens of one sequence in the cache
  int ring_capacity;
  // decode
  int beam_width, beam_columns;
  int paged;

  const float* alibi;
  long long alibi_batch_stride, alibi_head_stride;
  BiasTable bias, new_token_bias;
  T5Table t5;
  const char* sinks;
  long long sinks_stride;  // in bytes
  int sinks_dtype;
  const float* out_scale;
  float scale;
  float cap_inverse, cap_level;  // softcap: 1 / cap, and the cap in base 2

  int batch, num_heads_q, num_heads_kv, group;
  Divisor by_group;
  int fixed_q;  // queries of each sequence if there is no cu_seqlens_q
  int causal, skip_decode, zero_finished;
  long long window_left, window_right;  // -1: no limit; below 2^31

  KeyMasks key_masks;
  const int* ranges;  // [batch][num_ranges][2], inclusive; a query inside a range sees the whole range
  long long range_batch_stride, range_stride, range_end_stride;
  int num_ranges;

  // Decode's stream-K schedule. The key tiles of all sequences, groups of heads and row blocks have one order, which is
  // cut into `blocks` equal ranges. head_lanes blocks share a range: each takes one of as many neighbouring heads, so
  // that adjacent memory is read at about the same time. Block b takes head lane b % head_lanes of range b /
  // head_lanes.
  int blocks;       // ranges
  int head_lanes;   // a power of two that divides num_heads_kv
  int row_blocks;   // of a sequence, in the cluster kernel
  int no_splits;    // no output tile is split (batch invariance); in all kernels
  // A mixed batch runs two kernels side by side: decode takes sequences of at most max_decode_q queries, prefill the
  // others. When one kernel runs alone, decode has the largest int and prefill has 0.
  int max_decode_q;
  const long long* prompt_tiles;  // decode: the number of tiles in prefill's schedule, or null
  float prompt_tile;              // the cost of one of these tiles, in tiles of decode
  unsigned* decode_begun;            // decode: counts its runs, prefill waits for it; or null
  int checks_stamp;               // an earlier call made the schedule: compare stamps (common/stamp.cuh)
  unsigned stamp_of_call;         // the stamp of what the host knows: shapes, windows
  IntTable stamped_kv;            // offsets of dense keys, which are part of the stamp
  struct StreamKRange* stream_k;  // decode: [blocks], written by the schedule kernel, for head lane 0
  // Decode: [blocks][head_lanes]: how many splits of the output tile that begins in this block have been stored. 0
  // before and after each run.
  unsigned* arrivals;
  // Decode: [batch / beam_width][num_heads_kv], or null: how many tiles have been read, where appending must wait for
  // all readers. 0 before and after each run.
  unsigned* tiles_done;
  float* partial_out;    // [splits][rows of a block][head_dim_v]; decode: [2 * blocks * head_lanes] splits
  float* partial_stats;  // [splits][rows of a block][2]: row_max (base 2), row_sum
};

}  // namespace attune::kernels
