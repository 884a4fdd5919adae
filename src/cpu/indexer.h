// SPDX-License-Identifier: Apache-2.0
// attune_indexer on the CPU.
#pragma once

#include <cstddef>

#include "core/indexer.h"

namespace attune::cpu {

// Bytes that a run of these shapes needs, with as many threads as the pool has now.
size_t indexer_workspace_size(const IndexerProblem& op);
// Throws as check_workspace does.
void run_indexer(const IndexerProblem& op, void* workspace, size_t bytes);

}  // namespace attune::cpu
