// SPDX-License-Identifier: Apache-2.0
// What the host and the decode kernels share: parameters, structs in the workspace, and the size of shared memory.
// Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "tile/prologue_params.h"

#ifdef __CUDACC__
#define ATTUNE_SHARED_FUNCTION __host__ __device__ constexpr
#else
#define ATTUNE_SHARED_FUNCTION constexpr
#endif

namespace attune::kernels {

// One axis of a table of int32, or a vector. data null: absent.
struct IntTable {
  const int* data;
  long long row_stride, col_stride;  // in elements
};

// Rows of K, or of V, of the tokens whose queries these are, of q's type: strides as q's, heads are KV heads. data
// null: absent.
struct NewRows {
  const char* data;
  long long batch_stride, row_stride, head_stride, dim_stride;  // in elements
};

// Rows of K, or of V. Element d of (page, slot, head) is at page * page_stride + slot * slot_stride + head *
// head_stride + (d / pack) * outer_stride + (d % pack) * inner_stride elements.
struct KvPlane {
  const char* data;
  long long page_stride, slot_stride, head_stride;  // in bytes
  long long outer_stride, inner_stride;             // in elements
  int pack;
  int contiguous;    // the elements of a row follow each other
  int table_is_own;  // V: page ids are in v_page_table
};

// x = code * scale. mode: 0 none, 1 per tensor, 2 per head, 3 per token and head.
struct KvScale {
  const float* data;
  long long page_stride, slot_stride, head_stride;  // in elements
  int mode;
};

// A bias [heads][rows][columns] of a float dtype; 0 beyond its rows and columns. data null: absent.
struct BiasTable {
  const char* data;
  long long head_stride, row_stride, column_stride;  // in bytes
  int rows, columns, dtype;
};

// T5: a bias by head and bucket of the distance between key and query.
constexpr int kMaxT5Steps = 64;
struct T5Table {
  const char* data;
  long long head_stride, bucket_stride;  // in bytes
  int dtype;
  int bidirectional;
  int buckets;       // of one direction
  int exact;         // distances below it have a bucket each
  int max_distance;  // from it on, all are in the last bucket
  int steps;
  int first[kMaxT5Steps];  // first distance of bucket exact + 1 + i
};

// n / divisor for 0 <= n < 2^31: n * multiplier >> shift. A division by a number that the compiler does not know is 30
// instructions, one after the other.
struct Divisor {
  unsigned multiplier;
  int shift;
};
ATTUNE_SHARED_FUNCTION Divisor make_divisor(unsigned divisor) {
  int shift = 31;
  while (shift < 62 && (1ull << (shift - 31)) < divisor) ++shift;
  return {static_cast<unsigned>(((1ull << shift) + divisor - 1) / divisor), shift};
}
ATTUNE_SHARED_FUNCTION int divide(int n, const Divisor& by) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * by.multiplier >> by.shift);
}

struct DecodeParams {
  // Queries [batch or 1, rows, num_heads_q, head_dim_qk]: sequence b begins at b * batch_stride, or at cu_seqlens_q[b]
  // * row_stride.
  const char* q;
  long long q_batch_stride, q_row_stride, q_head_stride, q_dim_stride;  // in elements, as all strides without a word
  char* out;                                                            // as q, head_dim_v
  long long out_batch_stride, out_row_stride, out_head_stride, out_dim_stride;
  float* lse;  // as q without the last axis; null: not wanted
  long long lse_batch_stride, lse_row_stride, lse_head_stride;
  float* max_logits;
  long long max_batch_stride, max_row_stride, max_head_stride;
  IntTable cu_seqlens_q;
  long long total_q;

  NewRows new_k, new_v;  // data null: the cache holds all keys
  PrologueParams prologue;
  int append;  // new tokens go to the cache

  KvPlane k, v;
  int v_is_k;  // V is the first head_dim_v channels of K
  KvScale k_scale, v_scale;
  IntTable page_table, v_page_table, batch_index, seqused_kv;
  IntTable cache_indirection, beam_prompt_length;
  const unsigned char* finished;
  long long finished_stride;
  long long num_pages;
  int page_size, page_shift;  // page_shift: log2, or -1
  int capacity;               // most tokens of one sequence in the cache
  int ring_capacity;
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
  int fixed_q;  // queries of each sequence where there is no cu_seqlens_q
  int causal, skip_decode, zero_finished;
  long long window_left, window_right;  // -1: no limit; below 2^31

  // Bit i % 8 of byte i / 8 of a query's row (and head) lets key mask_start + i through.
  const unsigned char* mask_bits;
  long long mask_row_stride, mask_head_stride, mask_byte_stride;
  int mask_columns;
  IntTable mask_start;
  const int* ranges;  // [batch][num_ranges][2]: inclusive; who is in one sees all of it
  long long range_batch_stride, range_stride, range_end_stride;
  int num_ranges;

  // Stream-K schedule. The key tiles of all sequences, groups of heads and row blocks have one order, which is cut into
  // `blocks` equal ranges. head_lanes blocks share a range, one for each of as many neighbouring heads, so that what is
  // adjacent in memory is read at about one time. Block b takes lane b % head_lanes of range b / head_lanes.
  int blocks;       // ranges
  int head_lanes;   // a power of two that divides num_heads_kv
  int row_blocks;   // of a sequence, in the cluster kernel
  int whole_pairs;  // ranges end at output tiles: nothing is split (batch invariance)
  // A mixed batch runs two kernels beside each other: decode takes sequences of at most few_q queries, prefill the
  // others. Alone, decode has the largest int and prefill 0.
  int few_q;
  const long long* prompt_tiles;  // decode: the number of tiles in prefill's schedule, or null
  float prompt_tile;              // the cost of one of them, in tiles of decode
  unsigned* few_begun;            // counts runs of decode, for prefill to wait on; or null
  int checks_stamp;               // an earlier call made the schedule: compare stamps (schedule/stamp.cuh)
  unsigned stamp_of_call;         // the stamp of all that the host knows: shapes, windows
  IntTable stamped_kv;            // offsets of dense keys, which are stamped too
  struct StreamKRange* stream_k;  // [blocks], written by the schedule kernel, for head lane 0
  // [blocks][head_lanes]: how many splits of the output tile that begins in the block are stored. 0 before and after
  // each run.
  unsigned* arrivals;
  // [batch / beam_width][num_heads_kv], or null: how many tiles have been read, where appending must wait for all
  // readers. 0 before and after each run.
  unsigned* tiles_done;
  float* partial_out;    // [2 * blocks * head_lanes][rows of a block][head_dim_v]
  float* partial_stats;  // [2 * blocks * head_lanes][rows of a block][2]: row_max (base 2), row_sum
};

// A sequence by the lengths on the device: its queries, the keys that they may see, and the tiles that hold those.
struct Sequence {
  long long q_begin;  // first row of q; 0 where rows count from the sequence's own
  int num_q;
  int num_keys;               // cached and new
  int first_key, end_key;     // cached keys that some query may see
  int first_tile, num_tiles;  // the tiles of those keys; one, which is empty, where there are none
  int row_blocks;             // blocks of packed rows; 0: there is no work
  int num_new;                // tokens beside the cache, the last of num_keys; 0 where there is no work
};

// A run of key tiles of one output tile, which is a (sequence, KV head, row block).
struct Split {
  int batch, head;
  int row_begin, num_rows;   // packed rows of the sequence: query-major, the heads of a KV head inside
  int first_tile, end_tile;  // counted from key 0
  int is_first, is_last;     // the split holds the first, the last tile of its output tile
  long long output_tile_begin, output_tile_end;  // stream-K tiles of the whole output tile
};

// The stream-K range of a block, and the walk over it. The schedule kernel leaves it at its first split.
struct alignas(16) StreamKRange {
  long long total_tiles;  // of the call
  long long next_tile, tiles_left, tile_in_sequence;
  int batch;
  int live;        // there is a split
  int blocks;      // ranges that the tiles are cut into, at most
  unsigned stamp;  // schedule/stamp.cuh
  Sequence sequence;
  Split split;
};

constexpr int kKeysOfWarp = 16;    // keys of a tile that one warp takes
constexpr int kMergeFloats = 512;  // of a warp: what the epilogue exchanges at a time

ATTUNE_SHARED_FUNCTION int row_chunks(int element_size, int head_dim) { return (head_dim + 15) / 16 * element_size; }
ATTUNE_SHARED_FUNCTION int row_pitch(int chunks) {
  return 16 * (chunks >= 2 && (chunks & (chunks - 1)) == 0 ? chunks : chunks | 1);
}
// Bytes of a stage of one warp.
ATTUNE_SHARED_FUNCTION int stage_bytes(int element_size, int head_dim_qk, int head_dim_v, bool token_scales) {
  return kKeysOfWarp *
             (row_pitch(row_chunks(element_size, head_dim_qk)) + row_pitch(row_chunks(element_size, head_dim_v))) +
         (token_scales ? 2 * kKeysOfWarp * 4 : 0);
}
ATTUNE_SHARED_FUNCTION int align_up(int x, int to) { return (x + to - 1) / to * to; }
// sizeof(decode::SharedStorage), which asserts it.
ATTUNE_SHARED_FUNCTION int decode_shared_bytes(int warps, int num_stages, int element_size, int head_dim_qk,
                                               int head_dim_v, int row_tiles, int parts, bool token_scales) {
  const int rows = 8 * row_tiles;
  const int stages = warps * num_stages * stage_bytes(element_size, head_dim_qk, head_dim_v, token_scales);
  const int queries = parts * rows * row_pitch(row_chunks(2, head_dim_qk));
  const int exchange = warps * (kMergeFloats + 4 * rows) * 4;  // its rows are padded by four floats
  const int stats = (warps * 3 + 1) * rows * 4, valid_keys = align_up(warps * num_stages * 4, 16);
  return stages + queries + exchange + stats + valid_keys + (warps + 1) * static_cast<int>(sizeof(StreamKRange)) + 16;
}

}  // namespace attune::kernels
