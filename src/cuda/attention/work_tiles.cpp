// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/work_tiles.h"

#include <algorithm>

#include "core/integers.h"

namespace attune::cuda::attention {

int choose_heads_of_tile(int64_t group, int rows_of_tile, int64_t most_tokens) {
  int64_t best = 1, best_rows = std::min<int64_t>(rows_of_tile, most_tokens);
  for (int64_t heads = 2; heads <= std::min<int64_t>(group, rows_of_tile); ++heads) {
    if (group % heads != 0) continue;
    const int64_t rows = std::min(rows_of_tile / heads, most_tokens) * heads;
    if (rows * 16 >= best_rows * 15) best = heads, best_rows = std::max(rows, best_rows);
  }
  return static_cast<int>(best);
}

WorkLimits work_limits(const Problem& p, int64_t tokens, int64_t heads, bool splits, int num_sms) {
  // Row blocks of all sequences, at most: a sequence's last one may have a single token.
  const int64_t row_blocks = p.cu_q ? p.total_q / tokens + p.batch : p.batch * ceil_div(p.fixed_q, tokens);
  const int64_t most = splits ? num_sms : row_blocks * (p.heads_q / heads);
  return {row_blocks + num_sms, static_cast<int>(std::clamp<int64_t>(most, 1, num_sms))};
}

}  // namespace attune::cuda::attention
