// SPDX-License-Identifier: Apache-2.0
// The indexer of sparse attention, checked and normalised.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attune/attune.h"
#include "core/kv_cache.h"
#include "core/tensor.h"

namespace attune {

// Keys [begin, end) of one row.
struct KeyRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
};

struct IndexerProblem {
  int32_t kind = ATTUNE_INDEXER_TOPK;
  bool causal = false, clear_scores = false;
  bool slots = false;                   // indices hold slots, not positions
  int64_t batch = 0, total_q = 0;       // sequences, rows
  int64_t fixed_q = 0;                  // rows of each sequence where there is no cu
  int64_t num_heads = 0, head_dim = 0;  // 0 for SELECT
  int64_t topk = 0;                     // 0 for SCORES
  int64_t num_columns = 0;              // of scores
  int64_t max_seqlen_kv = 0;            // the number of keys of a sequence is clamped to it

  RowView q;                 // [row, head, d]
  RowView q_scale, weights;  // [row, head]
  RowView scores, indices;   // [row, column]
  IntView cu, seqused, key_begin, key_end;
  int32_t* topk_length = nullptr;
  int64_t topk_length_stride = 0;
  KvCache cache;  // optional for SELECT
  IntView slot_table;
  int64_t slot_page_size = 0, slot_pages = 0;

  bool reads_keys() const { return kind != ATTUNE_INDEXER_SELECT; }
  bool selects() const { return kind != ATTUNE_INDEXER_SCORES; }
  int64_t num_keys(int64_t b) const { return std::clamp<int64_t>(seqused(b), 0, max_seqlen_kv); }

  // The keys that row i of the n rows of a sequence of s keys sees, if all pages are in range. row: in the whole
  // tensor.
  KeyRange visible(int64_t row, int64_t i, int64_t n, int64_t s) const {
    KeyRange r;
    r.end = causal ? std::clamp<int64_t>(s - n + i + 1, 0, s) : s;
    if (key_end) r.end = std::clamp<int64_t>(key_end(row), 0, r.end);
    if (key_begin) r.begin = std::clamp<int64_t>(key_begin(row), 0, r.end);
    return r;
  }
  // The entry of indices for position t of sequence b; -1 where the page is out of range: the token is
  // masked.
  int64_t entry(int64_t b, int64_t t) const {
    int64_t slot = t;
    if (cache) {
      const KvSlot at = cache.find(b, t, false);
      if (at.page < 0) return -1;
      slot = at.page * cache.page_size + at.offset;
    }
    if (slot_table) {
      const int64_t page = slot_table(b, t / slot_page_size);
      if (page < 0 || page >= slot_pages) return -1;
      slot = page * slot_page_size + t % slot_page_size;
    }
    return slots ? slot : t;
  }
};

// Throws INVALID_ARGUMENT with the field that is wrong.
IndexerProblem make_indexer(const attune_indexer& op, Data data);

}  // namespace attune
