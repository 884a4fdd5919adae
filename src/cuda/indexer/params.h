// SPDX-License-Identifier: Apache-2.0
// From a checked indexer to the flat parameters of its kernels.
#pragma once

#include "core/indexer.h"
#include "cuda/indexer/config.h"
#include "indexer/indexer_params.h"

namespace attune::cuda::indexer {

// The rows first..first + count - 1 of a launch. The kernel that finds the sequence of each row takes all.
kernels::IndexRows index_rows(const IndexerProblem& op, const Layout& layout, void* workspace, int64_t first,
                              int64_t count);
// num_sms: the multiprocessors that the grid must fill.
kernels::IndexScoresParams scores_params(const IndexerProblem& op, const ScoresConfig& c, const Layout& layout,
                                         void* workspace, int64_t first, int64_t count, int num_sms);
kernels::IndexSelectParams select_params(const IndexerProblem& op, const Layout& layout, void* workspace, int64_t first,
                                         int64_t count);

}  // namespace attune::cuda::indexer
