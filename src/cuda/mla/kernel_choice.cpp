// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla/kernel_choice.h"

#include <algorithm>

#include "cuda/prefill/config.h"

namespace attune::cuda::mla {
namespace {

using kernels::kMlaFewRows;
using kernels::kMlaHalfRows;
using kernels::kMlaKeys;
using kernels::kMlaRowsOfBlock;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One token's heads are the rows of a block. Several tokens of a sequence see the same keys: in a block of the other
// kernel, which reads them once.
bool takes_one_token(const Problem& p, kernels::MlaLoader loader) {
  return p.cache && !p.dense_kv && !(p.sparse && p.new_tokens) && tokens_of_keys(p) == 1 &&
         loader != kernels::kMlaCodes584;
}

// What a token sees at most.
int64_t tiles_of_token(const Problem& p) {
  if (p.sparse) return ceil_div(p.list.topk, kMlaKeys) + ceil_div(p.extra_list.topk, kMlaKeys);
  return ceil_div(p.max_seqlen_kv, kMlaKeys);
}

// In microseconds of an H200, as measured for small batches in graphs (docs/kernels/mla.md): of a call whose blocks of
// rows are cut along the keys, of each tile of a part, and of each block of the grid that has one, as they share the
// memory.
struct Cost {
  double call, tile, block;
};
constexpr Cost kFewPacked{6.3, 1.42, 0.0185}, kFewPlain{7.0, 1.4, 0.013}, kHalfPacked{9.2, 1.4, 0.023},
    kPairsPacked{7.0, 2.4, 0.029}, kOwnPacked{7.0, 2.9, 0.029}, kManyPlain{6.95, 1.85, 0.028};
constexpr double kMergedPart = 0.07;      // of each part of a row beyond
constexpr int64_t kPartsMergedOnce = 16;  // those that a merge asks for at a time

int heads_of_block(const Problem& p, int rows) {
  return prefill::choose_heads_of_tile(p.group, rows, tokens_of_keys(p));
}

Cost cost_of(const Problem& p, int rows, kernels::MlaLoader loader) {
  const bool packed = loader >= kernels::kMlaCodes656;
  if (rows == kMlaFewRows) return packed ? kFewPacked : kFewPlain;
  if (rows == kMlaHalfRows) return kHalfPacked;
  if (!packed) return kManyPlain;
  return p.group / heads_of_block(p, rows) % 2 == 0 ? kPairsPacked : kOwnPacked;
}

// What the schedule makes of equal sequences: tiles of a part, parts of a block of rows, and all parts.
struct Cut {
  int64_t tiles, parts, all;
};
Cut cut_of(const Problem& p, const Form& form, int num_sms) {
  const int heads = heads_of_block(p, form.rows);
  const int64_t tokens = p.sparse || form.rows != kMlaRowsOfBlock ? 1 : kMlaRowsOfBlock / heads;
  const int64_t each = ceil_div(ceil_div(p.total_q, std::max<int64_t>(p.batch, 1)), tokens);
  const int64_t blocks = p.batch * each * (p.heads_q / heads), tiles = tiles_of_token(p);
  if (blocks >= num_sms) return {ceil_div(blocks * tiles, num_sms), 1, num_sms};
  const int64_t most_parts = num_sms / std::max<int64_t>(blocks, 1);
  const int64_t of_part = std::max<int64_t>(ceil_div(tiles, most_parts), form.fewest_tiles);
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

Form choose_form(const Problem& p, kernels::MlaLoader loader, int num_sms) {
  constexpr int kFewestTiles = 2;
  const bool few = takes_one_token(p, loader), half = few && loader == kernels::kMlaCodes656;
  Form form{kMlaRowsOfBlock, kFewestTiles};  // what the number of heads says
  if (few && p.group <= kMlaFewRows) {
    form.rows = kMlaFewRows;
  } else if (half && p.group <= kMlaHalfRows) {
    form.rows = kMlaHalfRows;
  }
  if (p.batch_invariant || cut_of(p, form, num_sms).parts <= 1) return form;
  const auto time = [&](const Form& x) { return time_of(cost_of(p, x.rows, loader), cut_of(p, x, num_sms)); };
  const int own_rows = form.rows;
  for (const int fewest : {kFewestTiles, 1}) {
    for (const int rows : {kMlaRowsOfBlock, kMlaHalfRows, kMlaFewRows}) {
      if (rows > own_rows || (rows < own_rows && !(rows == kMlaHalfRows ? half : few))) continue;
      if (const Form other{rows, fewest}; time(other) < time(form)) form = other;
    }
  }
  return form;
}

}  // namespace attune::cuda::mla
