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
// cut along the keys, of each tile of a part, and of each block of the grid that has one, as they share the memory.
struct Cost {
  double call, tile, block;
};
constexpr Cost kFewPacked{8.5, 1.58, 0.013}, kFewPlain{8.6, 1.5, 0.013}, kManyPacked{9.2, 2.65, 0.02},
    kManyPlain{9.4, 1.67, 0.02};
constexpr double kMergedPart = 0.1;       // of each part of a row beyond
constexpr int64_t kPartsMergedOnce = 16;  // those that a merge asks for at a time

// What the schedule makes of equal sequences: tiles of a part, parts of a block of rows, and all parts.
struct Cut {
  int64_t tiles, parts, all;
};
// Where blocks have so many rows at most.
Cut cut_of(const Problem& p, int most_rows, int num_sms) {
  const int64_t blocks = p.total_q * p.heads_q / prefill::choose_heads_of_tile(p.group, most_rows, 1);
  const int64_t tiles = tiles_of_token(p);
  if (blocks >= num_sms) return {ceil_div(blocks * tiles, num_sms), 1, num_sms};
  const int64_t most_parts = num_sms / std::max<int64_t>(blocks, 1);
  const int64_t of_part = std::max<int64_t>(ceil_div(tiles, most_parts), kernels::kMlaFewestTiles);
  const int64_t parts = ceil_div(tiles, of_part);
  return {of_part, parts, blocks * parts};
}
double time_of(const Cost& c, const Cut& cut) {
  return c.call + c.tile * static_cast<double>(cut.tiles) + c.block * static_cast<double>(cut.all) +
         kMergedPart * static_cast<double>(std::max<int64_t>(cut.parts - kPartsMergedOnce, 0));
}

}  // namespace

int64_t tokens_of_keys(const Problem& p) {
  return p.sparse || (p.total_q == p.batch && !p.batch_invariant) ? 1 : std::max<int64_t>(1, p.max_seqlen_q);
}

bool takes_few_rows(const Problem& p, kernels::MlaLoader loader, int num_sms) {
  if (!can_take(p, loader)) return false;
  if (p.group <= kMlaFewRows || p.batch_invariant) return p.group <= kMlaFewRows;
  const bool packed = loader == kernels::kMlaCodes656;
  const Cut many = cut_of(p, kernels::kMlaRowsOfBlock, num_sms);
  if (many.parts <= 1) return false;
  return time_of(packed ? kFewPacked : kFewPlain, cut_of(p, kMlaFewRows, num_sms)) <
         time_of(packed ? kManyPacked : kManyPlain, many);
}

bool takes_half_block(const Problem& p, kernels::MlaLoader loader) {
  return loader == kernels::kMlaCodes656 && can_take(p, loader) && p.group > kMlaFewRows &&
         p.group <= kernels::kMlaHalfRows;
}

}  // namespace attune::cuda::mla
