// SPDX-License-Identifier: Apache-2.0
// What the host and the kernels of prefill share: parameters, work tiles in the workspace, and the size of shared
// memory. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "decode/decode_params.h"

namespace attune::kernels {

// A run of key tiles for one block of packed rows (tokens of a sequence, the heads of a head tile inside), for every
// head tile. Tiles of keys in the cache begin at multiples of the tile, those of dense keys at the first one
// that is seen; both are counted in one line.
struct alignas(16) WorkTile {
  long long q_begin;  // first row of q in a ragged batch
  long long q_row;    // the sequence's first row of q among those that the TMA knows by one number
  long long kv_row;   // likewise of dense k and v
  int batch;
  int token_begin, num_tokens;
  int num_q;
  int num_cached, num_keys;
  int first_key, end_key;     // that some row of the block may see
  int tile_begin, tile_end;   // of this part
  int split_idx, num_splits;  // of the block's tiles
  int first_split;            // of all parts of blocks that are split: where partial results go
  union {
    int split_tile;  // of all blocks that are split: its counter, where the kernel that attends merges
    int next_work;   // where another one does: the share's next work tile (balanced.cuh); 0 where there is none
  };
};

// z (terms[0] + terms[1] z^2 + ..) for products z of a row whose largest is in [low, high], or all of which are in
// [-high, high].
template <int kTerms>
struct CapPolynomial {
  float terms[kTerms], low, high;
};

// At the beginning of the schedule's part of the workspace.
struct alignas(16) WorkList {
  int num_work_tiles;   // of which each goes to whoever is free; or with which shares begin
  int heads_at_a_time;  // head tiles whose keys fit the L2 together: all work tiles of some, then of the next
  unsigned next_item;   // (work tile, head tile) pairs that have been taken, as tile_scheduler.cuh counts; 0 before and
                        // after a run
  int num_split_tiles;  // blocks of rows that are cut into parts
  long long num_tiles;  // of all work tiles, times head tiles
  // What a kernel acquires that reads what kernels before the one before it have written (ptx/atomic.cuh).
  unsigned seen;         // 1 when a block of the attention has the list: for the kernel that merges
  unsigned few_begun;    // runs of the kernel that serves the call's short sequences that have begun, and
  unsigned few_ended;    // those that this kernel, which runs beside it, has ended with
  unsigned blocks_done;  // of the present one; 0 before and after a run
  unsigned stamp;        // schedule/stamp.cuh
};

// Sparse attention: each row's entries, slots of a cache or numbers of dense keys; those out of range are passed over.
// indices null: absent.
struct SlotList {
  const int* indices;
  long long batch_stride;  // in elements; 0 where rows of a ragged batch count on
  long long row_stride, head_stride, entry_stride;
  IntTable length;  // entries in use, of a sequence or a row of q; absent: topk
  int length_by_row;
  int topk;
};

// Rows of `page_size` slots a page. Dense rows, from the first of all, have one page.
struct RowPool {
  const char* data;
  long long page_stride, slot_stride, head_stride;  // in bytes
  long long batch_stride;                           // of dense rows
  int num_slots, page_size;
  // x / page_size of an x below 2^31 is x * page_magic >> page_shift.
  unsigned page_magic;
  int page_shift;
};

struct PrefillParams : DecodeParams {
  // Sparse attention. Entries of extra_list, slots of a second cache, follow those of list, from a tile of their own
  // on.
  SlotList list_of_slots, list_of_extra;
  // Where rows of keys lie for threads that copy them one by one: the cache; a second cache, or dense rows.
  RowPool pools[2];
  long long total_kv;      // dense rows
  IntTable cu_seqlens_kv;  // of dense keys that are not q's tokens
  int q_flat, kv_flat;     // rows of q, and dense rows, have one number; else a batch and a row of it
  int fixed_kv;            // dense keys of each sequence where there is no cu_seqlens_kv
  int dense;               // there are dense keys: all of them, or new tokens after the cache
  int cached;              // there is a cache
  int box_shift;           // of the cache: log2 of the keys of one copy
  int heads_of_tile;       // query heads that share a block of rows; divides group
  unsigned inverse_heads;  // a row of a block * inverse_heads >> 16 is the token that it is of
  int tokens_of_tile;      // most tokens of a block of rows
  int num_head_tiles;
  int num_blocks;  // of the grid
  int max_work_tiles;
  int blocks_each;    // blocks of rows of a sequence, where the host knows all alike and uncut; else 0
  int bytes_of_key;   // of K and V of one KV head; 0: work tiles go through all head tiles before the next begins
  int plain_out;      // only rows of out, without sinks and scale; a block's lie within 2^31 elements
  int store_vectors;  // rows of out take 16-byte stores
  WorkList* list;
  WorkTile* work_tiles;   // [max_work_tiles]
  int* block_begin;       // [batch]: blocks of rows before each sequence, from the first that its thread has
  unsigned* splits_done;  // [splits][num_head_tiles]; 0 before and after each run
  WorkTile* split_tiles;  // [splits]: the blocks of rows that are cut, for a kernel that merges them; or null
  // Softcap: the score in base 2 of a product s is cap_level tanh(cap_unit s). In a row whose products' maximum is
  // small enough it is a polynomial, as far as that matters: the smaller, the shorter.
  float cap_unit;
  CapPolynomial<2> cap_small;  // of products in [low, high]; 0 where there are none
  CapPolynomial<3> cap_short;
  CapPolynomial<5> cap_long;
  CapPolynomial<7> cap_wide;
  int fewest_tiles;  // of a part of a block of rows: less would not pay for the merge
};

// Rows of a cache of 8 bits as the TMA brings them: in blocks of 128 channels, zeros beyond the head dim. A box of a
// single row must go to a multiple of 128 bytes.
constexpr int kRawPitch = 128;
ATTUNE_SHARED_FUNCTION int raw_blocks(int head_dim) { return (head_dim + 127) / 128; }
ATTUNE_SHARED_FUNCTION int raw_bytes(int keys, int head_dim_qk, int head_dim_v) {
  return keys * kRawPitch * raw_blocks(head_dim_qk > head_dim_v ? head_dim_qk : head_dim_v);
}

// Packed rows of a block. Of fp32 numbers q, K and V take three times the shared memory: blocks of wide rows have half
// as many.
ATTUNE_SHARED_FUNCTION int prefill_rows(int head_dim_qk, int head_dim_v, int element_size) {
  return element_size == 4 && (head_dim_qk > 128 || head_dim_v > 128) ? 64 : 128;
}

// A work tile on its way from the loader that takes it to those who work on it.
constexpr int kWorkSlots = 3;
struct alignas(16) WorkSlot {
  WorkTile work;
  int head_tile;
  long long out_base;  // of the work tile's first row: elements from the beginning of `out` on
};

// In shared memory, where the schedule's stamp is checked (schedule/stamp.cuh): that of the call, and what sums begin
// with: 0, or NaN where the two differ.
struct ScheduleCheck {
  unsigned stamp;
  float first_sum;
};

// sizeof(prefill::SharedStorage), which asserts it. raw_stages: of the ring of codes; 0 where nothing is converted.
// element_size: of q; of codes V has a line of 128 keys for each channel, and alone passes through the ring; fp32
// numbers enter the products as three of 16 bits.
ATTUNE_SHARED_FUNCTION int prefill_shared_bytes(int rows, int keys, int stages, int raw_stages, int head_dim_qk,
                                                int head_dim_v, int element_size, int query_stages = 1) {
  const bool codes = element_size == 1;
  const int parts = element_size == 4 ? 3 : 1, line = codes ? 128 : 64;
  const int blocks_qk = (head_dim_qk + line - 1) / line * parts, blocks_v = (head_dim_v + line - 1) / line * parts;
  const int q = query_stages * blocks_qk * rows * 128, k = stages * blocks_qk * keys * 128;
  const int v = (stages - (query_stages - 1)) * (codes ? align_up(head_dim_v, 32) : blocks_v * keys) * 128;
  const int raw = raw_stages * raw_bytes(keys, codes ? head_dim_v : head_dim_qk, head_dim_v);
  const int barriers = align_up((4 * stages + 2 * raw_stages + 2 * kWorkSlots + 1 + 2 * query_stages) * 8, 16);
  const int masks = (stages + raw_stages) * align_up(4 + keys / 8, 16), over_cap = 16;
  const int limits = codes ? rows * 2 * 16 : 0, scales = !codes && raw_stages > 0 ? stages * 2 * keys * 4 : 0;
  const int slots = kWorkSlots * static_cast<int>(sizeof(WorkSlot)), is_last = 16;
  return align_up(q + k + v + raw + barriers + masks + over_cap + limits + scales + slots + is_last, 1024);
}

// What threads that load rows themselves need to know of each: whether four channels from a multiple of four on lie
// side by side at an address that is aligned to them.
struct Fp32Rows {
  int q, dense_k, dense_v, cached_k, cached_v;
};

}  // namespace attune::kernels
