// SPDX-License-Identifier: Apache-2.0
// From raw dot products to masked scores: scale, softcap, additive terms, then -inf where a row may not see a key.
#pragma once

#include <vector>

#include "core/kernel.h"
#include "cpu/tile.h"

namespace attune::cpu {

// What these functions know: the masks and terms that a kernel which calls them covers.
extern const uint32_t kScoreMasks, kScoreTerms;

// T5 bucket of every distance within max_distance, built once a plan.
struct T5Buckets {
  int64_t max_distance = 0;
  std::vector<int32_t> bucket;  // of distance d at d + max_distance
  int32_t operator()(int64_t distance) const;
};
T5Buckets make_t5_buckets(const Problem& p);

// The rows of one KV head of an item.
struct ScoreRows {
  const Problem& p;
  const Sequence& sequence;
  const Item& item;
  const T5Buckets& t5;
  int64_t kv_head;  // one of the item's

  int64_t query(int64_t r) const { return (item.row_begin + r) / p.group; }
  int64_t head(int64_t r) const { return kv_head * p.group + (item.row_begin + r) % p.group; }
  int64_t position(int64_t r) const { return sequence.position(query(r)); }
};

// Scores s[0..m) of rows [row, row + m) of the item against columns [first, first + n): applies everything but the
// mask. Returns the factor that takes s to base 2 logits.
float apply_score_terms(const ScoreRows& rows, int row, int m, int64_t first, const KvTile& tile, float* s,
                        Scratch& scratch, const KernelTable& kernels);

// True if every row of [row, row + m) sees every column: nothing to mask.
bool fully_visible(const ScoreRows& rows, int row, int m, int64_t first, const KvTile& tile);
// Writes -inf where a row does not see a column. Returns the number of columns up to the last one that some row sees.
int apply_mask(const ScoreRows& rows, int row, int m, int64_t first, const KvTile& tile, float* s);

// Keys [first, last] that queries [query_begin, query_end) may see at all, by causality, windows and ranges; empty if
// last < first.
struct KeyRange {
  int64_t first, last;
};
KeyRange visible_keys(const Problem& p, const Sequence& s, int64_t b, int64_t query_begin, int64_t query_end);

}  // namespace attune::cpu
