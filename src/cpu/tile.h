// SPDX-License-Identifier: Apache-2.0
// What the parts of the CPU attention share: tile sizes, work items, and the scratch memory of a thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "core/workspace.h"
#include "cpu/kernels.h"

namespace attune::cpu {

inline constexpr int kPrefillN = 128;  // keys a tile, prefill
inline constexpr int kDecodeN = 64;    // keys a tile, decode and sparse
inline constexpr int kMaxTileN = 128;
inline constexpr int64_t kDecodeQueries = 16;  // sequences with more queries than this run as prefill
inline constexpr int kDecodeRows = 128;        // most packed rows of a decode item

// Packed rows of a prefill item: as many as leave Q, O and S in a core's L2 beside the key tile.
inline int prefill_rows(int64_t head_dim_qk, int64_t head_dim_v) {
  const int64_t width = head_dim_qk + head_dim_v;
  return width <= 256 ? 256 : (width <= 512 ? 128 : 64);
}

// 32-bit columns of a row of packed keys or values: an odd number of cache lines, as rows a power of two apart would
// share a few sets of L1, which the columns of a register tile then fall out of.
inline int packed_columns(int64_t columns) { return static_cast<int>(round_up(columns, 16) | 16); }

// Rows [row_begin, row_begin + num_rows) of KV heads [kv_head, kv_head + num_heads) of a sequence, packed as query *
// group + head in group, against keys [kv_begin, kv_end). In scratch and in partial results heads follow each other:
// row h * num_rows + r.
struct Item {
  int64_t row_begin;
  int64_t kv_begin, kv_end;
  int64_t cost;
  int32_t sequence, kv_head;
  int32_t num_rows, num_heads;
  int32_t partial;  // slot for the partial result; -1: the item is whole
};

// Merges the partial results of slots [first, first + count): the splits of one item.
struct MergeTask {
  int64_t row_begin;
  int32_t sequence, kv_head;
  int32_t num_rows, num_heads;
  int32_t first, count;
};

// A tile of keys: row i of K and of V, staged or in place.
struct KvTile {
  int n = 0;  // columns
  attune_dtype codes =
      ATTUNE_DTYPE_NONE;     // rows are 8-bit codes of this dtype, in place; NONE: elements of the row type
  const void* k[kMaxTileN];  // rows of head_dim_qk elements
  const void* v[kMaxTileN];  // rows of head_dim_v elements
  bool masked[kMaxTileN];    // no such token (bad page id): the column is masked
  bool any_hidden = false;
  bool in_place = false;  // all rows lie in the cache as they are
  bool scaled = false;    // the factors below are in use
  float k_factor[kMaxTileN], v_factor[kMaxTileN];
};

// Addresses of the rows of a tile, for prefetching. They are those of the item's first KV head.
struct AheadRows {
  int n = 0;
  int64_t k_bytes = 0, v_bytes = 0;  // of a row
  int64_t k_step = 0, v_step = 0;    // bytes from one head's row to the next head's
  const void* k[kDecodeN];
  const void* v[kDecodeN];
};

// How tiles are computed, fixed by the plan.
struct Compute {
  TileType tile = TileType::kF32;         // of Q, P and packed keys
  TileType decode_rows = TileType::kF32;  // of the rows that the decode kernels read (kBF16 with an fp32 tile: mixed)
  const KernelTable* kernels = nullptr;
};

// Scratch of one thread; sizes from scratch_bytes().
struct Scratch {
  void* q;             // [rows][ld_q] of the tile type
  float* row_f32;      // one row of any head dim
  float* o;            // [rows][ld_o]
  float* s;            // [rows][kMaxTileN]
  void* p;             // [rows][kMaxTileN] of bf16, or s
  float* row_max;      // [rows]
  float* row_sum;      // [rows]
  float* position;     // [rows]
  float* slope;        // [rows]
  std::byte* k_stage;  // [kMaxTileN][ld_q] of the row type
  std::byte* v_stage;  // [kMaxTileN][ld_o]
  void* k_pack;        // packed K^T
  void* v_pack;
  std::byte* zeros;  // a row of zeros
  KvTile* tile;
  float* factors;       // [k, v][KV heads of the item, at most kDecodeRows][kDecodeN]: scales of a tile
  AheadRows* ahead[3];  // of this tile, the next and the one after
  int64_t ld_q, ld_o;   // in elements, multiples of 16
};

size_t scratch_bytes(int64_t rows, int64_t head_dim_qk, int64_t head_dim_v);
Scratch make_scratch(std::byte* base, int64_t rows, int64_t head_dim_qk, int64_t head_dim_v, TileType tile);

}  // namespace attune::cpu
