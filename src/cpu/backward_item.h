// SPDX-License-Identifier: Apache-2.0
// The work items of the backward on the CPU.
#pragma once

#include <cstdint>

#include "cpu/gradient_tile.h"

namespace attune::cpu {

// An item sums dq of its queries and heads over all keys, dk and dv of its keys over all queries of the heads, or both.
// Sums go over tiles in order, and tiles lie at multiples of their size: so the cut into items changes no bit.
struct GradientItem {
  int64_t sequence;
  int64_t kv_head;
  int64_t head_begin, head_end;    // query heads of kv_head
  int64_t query_begin, query_end;  // begins at a multiple of kTileRows
  int64_t key_begin, key_end;      // begins at a multiple of kTileKeys; may go past the keys in use
  bool dq, dk, dv;                 // what is summed and stored
};
template <class T>
void run_gradient_item(const GradientRun& run, const Sequence& sequence, const GradientItem& item,
                       GradientScratch<T>& scratch);

// Stores dsinks[head], summed in the order of the rows.
template <class T>
void sum_sink_gradient(const GradientRun& run, const Sequence* sequences, int64_t head, GradientScratch<T>& scratch);
// Stores dbias of positions [begin, begin + kTileRows) of a head of the table, summed over sequences and query heads in
// order.
template <class T>
void sum_bias_gradient(const GradientRun& run, const Sequence* sequences, int64_t table_head, int64_t begin,
                       GradientScratch<T>& scratch);
// Stores dt5_bias[head].
template <class T>
void sum_t5_gradient(const GradientRun& run, const Sequence* sequences, int64_t head, GradientScratch<T>& scratch);

}  // namespace attune::cpu
