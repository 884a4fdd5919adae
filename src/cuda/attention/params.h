// SPDX-License-Identifier: Apache-2.0
// From a problem to the parameters that all attention kernels have.
#pragma once

#include <string>

#include "common/attention_params.h"
#include "core/kernel.h"

namespace attune::cuda::attention {

// What decode and prefill cover alike; each adds queries, keys and a prologue.
Coverage coverage();

// What the kernels are compiled for: score terms (ATTUNE_SCORE) and masks (ATTUNE_MASK) of common/kinds.h. And T5's
// buckets; the table itself comes with a run.
int score_kinds(const Problem& p);
int mask_kinds(const Problem& p);
kernels::T5Table t5_buckets(const Problem& p);
// "" if the tables fit the kernels, else why they do not.
std::string table_refusal(const Problem& p);

// The strides of queries' rows, in elements: of sequences, where these are not ragged, of rows and of heads.
struct RowStrides {
  long long batch, row, head;
};
RowStrides row_strides(const Problem& p, const RowView& v);

// Rows of tokens beside the cache. new_rows: in batches as q's. dense_rows: batch_stride 0 where the tensor has no
// batch axis.
kernels::NewRows new_rows(const Problem& p, const RowView& v);
kernels::NewRows dense_rows(const RowView& v);
// What every attention kernel needs of a problem: sizes, rows, cache, scores and masks.
void fill_problem(const Problem& p, const kernels::T5Table& t5, kernels::AttentionParams& k);
// Throws INVALID_ARGUMENT where a run has ranges, and its plan's kernel has no such mask.
void check_ranges(const Problem& p, int mask);

// Throw where a kernel refuses a problem: UNSUPPORTED while planning, INVALID_ARGUMENT in a run.
void require_taken(const char* kernel, const std::string& why);
void require_still_taken(const char* kernel, const std::string& why);

}  // namespace attune::cuda::attention
