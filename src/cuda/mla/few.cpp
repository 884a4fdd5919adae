// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla/few.h"

#include <algorithm>

#include "cuda/prefill/config.h"

namespace attune::cuda::mla {
namespace {

using kernels::kMlaFewRows;
using kernels::kMlaKeys;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One token's heads are the rows of a block. Several tokens of a sequence see the same keys: in a block of the other
// kernel, which reads them once.
bool can_take(const Problem& p, kernels::MlaLoader loader) {
  return p.cache && !p.dense_kv && !(p.sparse && p.new_tokens) && tokens_of_keys(p) == 1 &&
         loader != kernels::kMlaCodes584;
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
  const int64_t blocks_of_rows = p.total_q * p.heads_q / prefill::choose_heads_of_tile(p.group, most_rows, 1);
  return std::max<int64_t>(ceil_div(blocks_of_rows * tiles_of_token(p), num_sms), kernels::kMlaFewestTiles);
}
double time_of(const Cost& c, int64_t tiles) { return c.call + c.tile * static_cast<double>(tiles); }

}  // namespace

int64_t tokens_of_keys(const Problem& p) {
  return p.sparse || (p.total_q == p.batch && !p.batch_invariant) ? 1 : std::max<int64_t>(1, p.max_seqlen_q);
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
