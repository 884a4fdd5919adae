// SPDX-License-Identifier: Apache-2.0
// What host and device share of the indexer's kernels. Strides of rows are in bytes. Compiled by NVRTC and by the
// host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"
#include "common/row_cache.h"

namespace attune::kernels {

constexpr int kIndexTileRows = 32;  // the most rows of a tile: a bit for each

// The rows, their sequences and the keys that they see.
struct IndexRows {
  long long total;           // rows of the tensors
  int rows_per_outer;        // 0: no outer axis
  long long first, count;    // the rows of this launch
  int fixed;                 // rows of each sequence if there is no cu_seqlens
  Divisor by_outer, by_fixed;
  int batch, causal;
  int* offsets;  // [batch + 1], from owners.cu: cu_seqlens clamped to the rows and made monotonic; null: fixed
  int* owners;   // [total], from owners.cu: the sequence of each row, -1: none
  IntTable cu_seqlens, seqused, key_begin, key_end;
  int max_seqlen_kv;
  int has_cache;
  RowCache cache;
  Divisor by_page;  // divides by the tokens of a page
};

// fp32 scores, [row, column].
struct IndexScoreRows {
  char* data;
  long long outer_stride, row_stride, column_stride;
  // Scores in the workspace: data is the launch's first row, rows have no outer axis, and keys on bad pages are -inf.
  int in_workspace;
};

struct IndexScoresParams {
  IndexRows rows;
  RowTensor q, q_scale, weights;  // q_scale.data null: 1
  int heads, head_dim;
  IndexScoreRows scores;
  int num_columns;
  int clear;      // columns that a row does not see become -inf
  int most_kept;  // rows that see at most this many keys need no scores; -1: all rows need them
  int tile_rows;  // of a tile, at most kIndexTileRows
  int key_blocks;
  Divisor by_key_blocks, pack;  // pack: of the cache's channels
  long long num_tiles;  // tiles times key_blocks, below 2^31
};

struct IndexSelectParams {
  IndexRows rows;
  IndexScoreRows scores;
  RowTensor indices;  // [row, entry]
  int topk;
  int* topk_length;              // null: not wanted
  long long topk_length_stride;  // in elements
  int slots;                     // entries are slots; otherwise positions
  IntTable slot_table;            // not given: entries are slots of the cache
  int slot_page_size, slot_pages;
  Divisor by_slot_page;
};

}  // namespace attune::kernels
