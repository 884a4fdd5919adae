// SPDX-License-Identifier: Apache-2.0
// The parameters of the kernels that take work tiles, prefill and MLA, and of their schedule; work tiles in the
// workspace. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/attention_params.h"

namespace attune::kernels {

// A range of key tiles for one block of packed rows (tokens of a sequence, with the heads of a head tile innermost),
// for each head tile. Tiles of cached keys come first and are aligned to the tile size; tiles of dense keys start at
// the first visible key. One index counts both.
struct alignas(16) WorkTile {
  long long q_begin;  // the sequence's first row of q in a ragged batch
  long long q_row;    // the same row, as the TMA counts rows
  long long kv_row;   // likewise of dense k and v
  int batch;
  int token_begin, num_tokens;
  int num_q;
  int num_cached, num_keys;
  int first_key, end_key;     // visible to some row of the block
  int tile_begin, tile_end;   // of this split
  int split_idx, num_splits;  // of the block's tiles
  int first_split;            // the block's first split among all splits: its place in the workspace
  union {
    int split_tile;  // index among the split blocks: their counters, where this kernel combines
    int next_work;   // where another kernel combines: the work tile that the same group takes next (balanced.cuh), or 0
  };
};

// z (terms[0] + terms[1] z^2 + ..) for products z of a row whose largest is in [low, high], or all of which are in
// [-high, high].
template <int kTerms>
struct CapPolynomial {
  float terms[kTerms], low, high;
};

// The head of the schedule's part of the workspace.
struct alignas(16) WorkList {
  int num_work_tiles;       // taken dynamically; in a balanced schedule, the first ones of its groups
  int heads_at_a_time;      // head tiles whose keys fit L2 together: all their work tiles go before those of the next
  unsigned next_tile;       // counts the (work tile, head tile) pairs taken; 0 before and after a run
  int num_split_tiles;      // row blocks with more than one split
  long long num_key_tiles;  // of all work tiles, times head tiles
  // Flags that kernels acquire to see the writes of kernels before the previous one (ptx/atomic.cuh).
  unsigned seen;           // 1 once a block of the attention kernel has read the list; for the kernel that combines
  unsigned decode_begun;   // mixed batches: runs that decode has begun,
  unsigned prefill_ended;  // and runs that this kernel, beside decode, has ended
  unsigned blocks_done;    // of the current run; 0 before and after a run
  unsigned stamp;          // common/stamp.cuh
};

// Sparse attention: the entries of each row, slots of a cache or indices of dense keys. Entries out of range are
// skipped. indices null: not given.
struct SlotList {
  const int* indices;
  long long batch_stride;  // in elements; 0 where the rows of a ragged batch are numbered through
  long long row_stride, head_stride, entry_stride;
  IntTable length;  // entries in use, of a sequence or a row of q; not given: topk
  int length_by_row;
  int topk;
};

// Rows in pages of `page_size` slots. Dense rows are one page.
struct RowPool {
  const char* data;
  long long page_stride, slot_stride, head_stride;  // in bytes
  long long batch_stride;                           // of dense rows
  int num_slots, page_size;
  Divisor by_page_size;
};

struct WorkTileParams : AttentionParams {
  // Sparse attention. Entries of list_of_extra, slots of a second cache, follow those of list_of_slots and begin a new
  // tile.
  SlotList list_of_slots, list_of_extra;
  // Rows of keys for threads that gather them: the cache; a second cache, or dense rows.
  RowPool pools[2];
  long long total_kv;      // dense rows
  IntTable cu_seqlens_kv;  // of dense keys that are not q's tokens
  int q_flat, kv_flat;     // rows of q, and dense rows, are numbered through; else by batch and row
  int fixed_kv;            // dense keys of each sequence where there is no cu_seqlens_kv
  int dense;               // there are dense keys: all keys, or new tokens after the cache
  int cached;              // there is a cache
  int box_shift;           // log2 of the keys of a TMA box of the cache
  int heads_of_tile;       // query heads that share a block of rows; divides group
  unsigned inverse_heads;  // row * inverse_heads >> 16 is the token of a packed row
  int tokens_of_tile;      // most tokens of a block of rows
  int num_head_tiles;
  int num_blocks;  // of the grid
  int max_work_tiles;
  int blocks_each;    // row blocks of a sequence, where the host knows that all are the same and unsplit; else 0
  int bytes_of_key;   // of K and V of one KV head; 0: the head tiles of a work tile go together
  int plain_out;      // only `out` is written, without sinks and out_scale; a block's rows lie within 2^31 elements
  int store_vectors;  // rows of out take 16-byte stores
  WorkList* list;
  WorkTile* work_tiles;   // [max_work_tiles]
  int* block_begin;       // [batch]: row blocks before each sequence, counted from the first sequence of its thread
  unsigned* splits_done;  // [splits][num_head_tiles]; 0 before and after each run
  WorkTile* split_tiles;  // [splits]: the split row blocks, for a kernel that combines them; or null
  // Softcap: the score in base 2 of a product s is cap_level tanh(cap_unit s). Where a row's products are small, a
  // polynomial replaces tanh: the smaller the products, the fewer terms.
  float cap_unit;
  CapPolynomial<2> cap_small;  // of products in [low, high]; 0 where there are none
  CapPolynomial<3> cap_short;
  CapPolynomial<5> cap_long;
  CapPolynomial<7> cap_wide;
  int fewest_tiles;  // of a split: shorter ones would not pay for the combine
};

// Bytes of a line of a box of 8-bit elements. A box of one row must start at a multiple of 128 bytes.
constexpr int kRawPitch = 128;

// A slot in which the producer passes a work tile to the other warps.
constexpr int kWorkSlots = 3;
struct alignas(16) WorkSlot {
  WorkTile work;
  int head_tile;
  long long out_base;  // the first element of the work tile in `out`
};

// The check of the schedule's stamp in shared memory (common/stamp.cuh). first_sum, the initial row sum, is 0, or NaN
// where the schedule is of another call.
struct ScheduleCheck {
  unsigned stamp;
  float first_sum;
};

}  // namespace attune::kernels
