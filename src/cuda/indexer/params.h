// SPDX-License-Identifier: Apache-2.0
// From a checked indexer to the flat parameters of its kernels.
#pragma once

#include "core/indexer.h"
#include "cuda/indexer/config.h"
#include "indexer/indexer_params.h"

namespace attune::cuda::indexer {

// Rows first..first + count - 1 of a launch; all rows for the owners.
kernels::IndexRows index_rows(const IndexerProblem& op, const Layout& layout, void* workspace, int64_t first,
                              int64_t count);
// num_sms: for how many multiprocessors the work is cut.
kernels::IndexScoresParams scores_params(const IndexerProblem& op, const ScoresConfig& c, const Layout& layout,
                                         void* workspace, int64_t first, int64_t count, int num_sms);
kernels::IndexSelectParams select_params(const IndexerProblem& op, const Layout& layout, void* workspace, int64_t first,
                                         int64_t count);

}  // namespace attune::cuda::indexer
