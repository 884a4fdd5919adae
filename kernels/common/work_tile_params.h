// SPDX-License-Identifier: Apache-2.0
// Parameters of the kernels that take work tiles, prefill and MLA, and of their schedule; and the work tiles in the
// workspace. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/attention_params.h"

namespace attune::kernels {

// A range of key tiles for one block of packed rows (tokens of a sequence, with the heads of a head tile innermost). It
// is run once for each head tile. Tiles of cached keys come first and are aligned to the tile size; tiles of dense keys
// start at the first visible key. One index counts both.
struct alignas(16) WorkTile {
  long long q_begin;  // the sequence's first row of q in a ragged batch
  long long q_row;    // the same row as a TMA coordinate
  long long kv_row;   // the first row of dense k and v, as a TMA coordinate
  int batch;
  int token_begin, num_tokens;
  int num_q;
  int num_cached, num_keys;
  int first_key, end_key;     // visible to some row of the block
  int tile_begin, tile_end;   // the tiles of this split
  int split_idx, num_splits;  // of the row block
  int first_split;            // the row block's first split among all splits: its index in the workspace
  union {
    int split_tile;  // index among the split row blocks, for their counters, if this kernel combines
    int next_work;   // if another kernel combines: the work tile that the same group takes next (balanced.cuh), or 0
  };
};

// The polynomial z (terms[0] + terms[1] z^2 + ..) of products z, for rows whose largest product is in [low, high], or
// whose products are all in [-high, high].
template <int kTerms>
struct CapPolynomial {
  float terms[kTerms], low, high;
};

// The header of the schedule in the workspace.
struct alignas(16) WorkList {
  int num_work_tiles;       // taken dynamically; in a balanced schedule, the first work tile of each group
  int heads_at_a_time;      // head tiles whose keys fit L2 together; their work tiles go before those of the next ones
  unsigned next_tile;       // counts the (work tile, head tile) pairs taken; 0 before and after a run
  int num_split_tiles;      // row blocks with more than one split
  long long num_key_tiles;  // of all work tiles, times head tiles
  // Flags that a kernel acquires to see the writes of kernels before the previous one (ptx/atomic.cuh).
  unsigned seen;           // 1 once a block of the attention kernel has read the list; read by the kernel that combines
  unsigned decode_begun;   // mixed batches: how many runs decode has begun
  unsigned prefill_ended;  // and how many runs this kernel, beside decode, has ended
  unsigned blocks_done;    // of the current run; 0 before and after a run
  unsigned stamp;          // common/stamp.cuh
};

// Sparse attention: the entries of each row, which are slots of a cache or indices of dense keys. Entries out of range
// are skipped. indices null: not given.
struct SlotList {
  const int* indices;
  long long batch_stride;  // in elements; 0 if the rows of a ragged batch have one numbering
  long long row_stride, head_stride, entry_stride;
  IntTable length;  // entries in use, by sequence or by row of q; if it is not given, topk
  int length_by_row;
  int topk;
};

// Rows in pages of `page_size` slots. Dense rows are one page.
struct RowPool {
  const char* data;
  long long page_stride, slot_stride, head_stride;  // in bytes
  long long batch_stride;                           // for dense rows
  int num_slots, page_size;
  Divisor by_page_size;
};

struct WorkTileParams : AttentionParams {
  // Sparse attention. Entries of list_of_extra, slots of a second cache, come after those of list_of_slots and begin a
  // new tile.
  SlotList list_of_slots, list_of_extra;
  // Rows of keys for threads that gather them: the cache; then a second cache, or dense rows.
  RowPool pools[2];
  long long total_kv;      // dense rows
  IntTable cu_seqlens_kv;  // for dense keys that are not q's tokens
  int q_flat, kv_flat;     // rows of q, and dense rows, have one numbering over the batch; otherwise batch and row
  int fixed_kv;            // dense keys of each sequence if there is no cu_seqlens_kv
  int dense;               // there are dense keys: all keys, or new tokens after the cache
  int cached;              // there is a cache
  int box_shift;           // log2 of the keys of a TMA box of the cache
  int heads_of_tile;       // query heads in one block of rows; divides group
  unsigned inverse_heads;  // row * inverse_heads >> 16 is the token of a packed row
  int tokens_of_tile;      // the most tokens in a block of rows
  int num_head_tiles;
  int num_blocks;  // of the grid
  int max_work_tiles;
  int blocks_each;    // row blocks of each sequence, if the host knows that all are equal and unsplit; otherwise 0
  int bytes_of_key;   // of K and V of one KV head; 0: all head tiles of a work tile go together
  int plain_out;      // only `out` is written, without sinks and out_scale; a block's rows lie within 2^31 elements
  int store_vectors;  // rows of out take 16-byte stores
  WorkList* list;
  WorkTile* work_tiles;   // [max_work_tiles]
  int* block_begin;       // [batch]: row blocks before each sequence, counted from the first sequence of its thread
  unsigned* splits_done;  // [splits][num_head_tiles]; 0 before and after each run
  WorkTile* split_tiles;  // [splits]: the split row blocks, for a kernel that combines them; or null
  // Softcap: the score in base 2 of a product s is cap_level tanh(cap_unit s). If a row's products are small, a
  // polynomial replaces tanh; the smaller they are, the fewer terms it has.
  float cap_unit;
  CapPolynomial<2> cap_small;  // for products in [low, high]; 0 if there are none
  CapPolynomial<3> cap_short;
  CapPolynomial<5> cap_long;
  CapPolynomial<7> cap_wide;
  // Splits have this many tiles at least, before those of a row block are made equal (nine tiles: three of three). The
  // combine would cost more than shorter ones gain.
  int fewest_tiles;
  int whole_tiles;  // if the longest row block of the batch has no more tiles, only the balanced schedule splits any
  // MLA: the rope channels of the queries, which may be apart from the latent channels in q. Strides as q's.
  const char* q_rope;
  long long q_rope_batch_stride, q_rope_row_stride, q_rope_head_stride;
};

// Bytes of a line of a box of 8-bit elements. A box of one row must start at a multiple of 128 bytes.
constexpr int kRawPitch = 128;

// A slot of the ring in shared memory through which the producer passes work tiles to the other warps.
constexpr int kWorkSlots = 3;
struct alignas(16) WorkSlot {
  WorkTile work;
  int head_tile;
  long long out_base;  // the work tile's first element in `out`
};

// The check of the schedule's stamp in shared memory (common/stamp.cuh). first_sum, the initial row_sum, is 0, or NaN
// if the schedule was made for another call.
struct ScheduleCheck {
  unsigned stamp;
  float first_sum;
};

}  // namespace attune::kernels
