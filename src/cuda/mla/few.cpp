// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla/few.h"

#include <algorithm>

namespace attune::cuda::mla {
namespace {

using kernels::kMlaFewRows;
using kernels::kMlaKeys;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One token's heads are the rows of a block. Several tokens of a sequence see the same keys: in a block of the other
// kernel, which reads them once. That other sequences have one token counts only where bits may depend on them.
bool can_take(const Problem& p, kernels::MlaLoader loader) {
  const bool one_token = p.sparse || p.max_seqlen_q <= 1 || (p.total_q == p.batch && !p.batch_invariant);
  return p.cache && !p.dense_kv && !(p.sparse && p.new_tokens) && one_token && loader != kernels::kMlaCodes584;
}

// What a token sees at most.
int64_t tiles_of_token(const Problem& p) {
  if (p.sparse) return ceil_div(p.list.topk, kMlaKeys) + ceil_div(p.extra_list.topk, kMlaKeys);
  return ceil_div(p.max_seqlen_kv, kMlaKeys);
}

// In microseconds of an H200, as measured for small batches (docs/kernels/mla.md): of a call whose blocks of rows are
// cut along the keys, and of a tile.
struct Cost {
  double call, tile;
};
constexpr Cost kFewPacked{9.5, 2.0}, kFewPlain{9.2, 1.6}, kManyPacked{13.1, 1.7}, kManyPlain{13.5, 1.7};

// Tiles that a block of the grid has, where blocks have so many rows at most.
int64_t tiles_of_block(const Problem& p, int most_rows, int num_sms) {
  const int64_t blocks_of_rows = p.total_q * p.heads_q / heads_of_one_token(p.group, most_rows);
  return std::max<int64_t>(ceil_div(blocks_of_rows * tiles_of_token(p), num_sms), kernels::kMlaFewestTiles);
}
double time_of(const Cost& c, int64_t tiles) { return c.call + c.tile * static_cast<double>(tiles); }

}  // namespace

int heads_of_one_token(int64_t group, int most) {
  int heads = 1;
  for (int i = 2; i <= std::min<int64_t>(group, most); ++i)
    if (group % i == 0) heads = i;
  return heads;
}

bool takes_few_rows(const Problem& p, kernels::MlaLoader loader, int num_sms) {
  if (!can_take(p, loader)) return false;
  if (p.group <= kMlaFewRows || p.batch_invariant) return p.group <= kMlaFewRows;
  const bool packed = loader == kernels::kMlaCodes656;
  const int64_t many = tiles_of_block(p, kernels::kMlaRowsOfBlock, num_sms);
  if (many >= tiles_of_token(p)) return false;  // they would not be cut
  return time_of(packed ? kFewPacked : kFewPlain, tiles_of_block(p, kMlaFewRows, num_sms)) <
         time_of(packed ? kManyPacked : kManyPlain, many);
}

}  // namespace attune::cuda::mla
