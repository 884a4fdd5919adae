// SPDX-License-Identifier: Apache-2.0
// The end of attention: sinks, normalisation, lse, the one rounding at the store, and the merge of partial results.
#pragma once

#include "cpu/score.h"
#include "cpu/tile.h"

namespace attune::cpu {

// Stores out, lse and max_logits of one row from its unnormalised o [head_dim_v], row_max (base 2) and row_sum.
// Overwrites o.
void store_row(const Problem& p, int64_t q_row, int64_t head, float* o, float row_max, float row_sum);
// out = 0, lse = max_logits = -inf.
void store_empty_row(const Problem& p, int64_t q_row, int64_t head, float* o);

// Partial results: num_rows x (max, sum, o).
inline int64_t partial_row_floats(const Problem& p) { return 2 + p.head_dim_v; }
void save_partial(const Problem& p, const Item& item, const Scratch& scratch, float* slot);
// Merges the slots in the order of their keys. Slots are slot_floats apart; o is scratch for one row.
void merge_partials(const Problem& p, const Sequence& s, const MergeTask& task, const float* slots, int64_t slot_floats,
                    float* o);

}  // namespace attune::cpu
