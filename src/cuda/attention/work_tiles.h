// SPDX-License-Identifier: Apache-2.0
// Row blocks and work tiles of the persistent kernels, prefill and MLA.
#pragma once

#include <cstdint>
#include <limits>

#include "core/problem.h"

namespace attune::cuda::attention {

// The most work tiles that the schedule lists, and the blocks of the grid. tokens, heads: of a row block; splits: row
// blocks may be split along the keys.
struct WorkLimits {
  int64_t max_work_tiles = 0;
  int blocks = 1;
};
WorkLimits work_limits(const Problem& p, int64_t tokens, int64_t heads, bool splits, int num_sms);

// The number of query heads of a KV head that fills a row block best, with at most most_tokens tokens; ties go to more
// heads.
int choose_heads_of_tile(int64_t group, int rows_of_tile, int64_t most_tokens = std::numeric_limits<int64_t>::max());

}  // namespace attune::cuda::attention
