// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla/kernel_choice.h"

#include <algorithm>

#include "core/integers.h"
#include "cuda/attention/params.h"
#include "cuda/attention/work_tiles.h"

namespace attune::cuda::mla {
namespace {

using kernels::kMlaBlockM;
using kernels::kMlaBlockN;
using kernels::kMlaM16Rows;
using kernels::kMlaSwapAbRows;

// The m16 and swap-AB kernels take the heads of one token as rows. Where several tokens see the same keys, the M = 64
// kernel reads these once for all. It alone has masks that are looked up key by key.
bool takes_one_token(const Problem& p, kernels::MlaProducer producer) {
  return p.cache && !p.dense_kv && attention::mask_kinds(p) == 0 && !(p.sparse && p.new_tokens) &&
         tokens_of_keys(p) == 1 && producer != kernels::kMlaDequant584;
}

// The most tiles that a token sees.
int64_t tiles_of_token(const Problem& p) {
  if (p.sparse) return ceil_div(p.list.topk, kMlaBlockN) + ceil_div(p.extra_list.topk, kMlaBlockN);
  return ceil_div(p.max_seqlen_kv, kMlaBlockN);
}

// Time in microseconds, measured on an H200 with small batches in graphs (docs/notes/mla-before.md): a call whose M
// blocks are split, each key tile of a split, and each block of the grid that has a split (blocks share the bandwidth).
struct Cost {
  double call, tile, block;
};
constexpr Cost kM16Packed{6.3, 1.42, 0.0185}, kM16Plain{7.0, 1.4, 0.013}, kSwapAbPacked{9.2, 1.4, 0.023},
    kM64PairPacked{7.0, 2.4, 0.029}, kM64Packed{7.0, 2.9, 0.029}, kM64Plain{6.95, 1.85, 0.028};
constexpr double kCombinedSplit = 0.07;        // of each split of a row beyond those
constexpr int64_t kSplitsCombinedAtOnce = 16;  // splits that mla/combine.cu loads at once

int heads_of_block(const Problem& p, int rows) {
  return attention::choose_heads_of_tile(p.group, rows, tokens_of_keys(p));
}

Cost cost_of(const Problem& p, int rows, kernels::MlaProducer producer) {
  const bool packed = producer >= kernels::kMlaDequant656;
  if (rows == kMlaM16Rows) return packed ? kM16Packed : kM16Plain;
  if (rows == kMlaSwapAbRows) return kSwapAbPacked;
  if (!packed) return kM64Plain;
  return p.group / heads_of_block(p, rows) % 2 == 0 ? kM64PairPacked : kM64Packed;
}

// How the schedule cuts equal sequences: tiles of a split, splits of an M block, and splits in all.
struct Cut {
  int64_t tiles, splits, all;
};
Cut cut_of(const Problem& p, const KernelChoice& choice, int num_sms) {
  const int heads = heads_of_block(p, choice.rows);
  const int64_t tokens = p.sparse || choice.rows != kMlaBlockM ? 1 : kMlaBlockM / heads;
  const int64_t each = ceil_div(ceil_div(p.total_q, std::max<int64_t>(p.batch, 1)), tokens);
  const int64_t blocks = p.batch * each * (p.heads_q / heads), tiles = tiles_of_token(p);
  if (blocks >= num_sms) return {ceil_div(blocks * tiles, num_sms), 1, num_sms};
  const int64_t most_splits = num_sms / std::max<int64_t>(blocks, 1);
  const int64_t of_split = std::max<int64_t>(ceil_div(tiles, most_splits), choice.fewest_tiles);
  const int64_t splits = ceil_div(tiles, of_split);
  return {of_split, splits, blocks * splits};
}
double time_of(const Cost& c, const Cut& cut) {
  return c.call + c.tile * static_cast<double>(cut.tiles) + c.block * static_cast<double>(cut.all) +
         kCombinedSplit * static_cast<double>(std::max<int64_t>(cut.splits - kSplitsCombinedAtOnce, 0));
}

}  // namespace

int64_t tokens_of_keys(const Problem& p) {
  return p.sparse || (p.total_q == p.batch && !p.batch_invariant) ? 1 : std::max<int64_t>(1, p.max_seqlen_q);
}

KernelChoice choose_kernel(const Problem& p, kernels::MlaProducer producer, int num_sms) {
  constexpr int kFewestTiles = 2;
  const bool m16 = takes_one_token(p, producer), swap_ab = m16 && producer == kernels::kMlaDequant656;
  KernelChoice choice{kMlaBlockM, kFewestTiles};  // by the number of heads
  if (m16 && p.group <= kMlaM16Rows) {
    choice.rows = kMlaM16Rows;
  } else if (swap_ab && p.group <= kMlaSwapAbRows) {
    choice.rows = kMlaSwapAbRows;
  }
  if (p.batch_invariant || cut_of(p, choice, num_sms).splits <= 1) return choice;
  const auto time = [&](const KernelChoice& x) { return time_of(cost_of(p, x.rows, producer), cut_of(p, x, num_sms)); };
  const int own_rows = choice.rows;
  for (const int fewest : {kFewestTiles, 1}) {
    for (const int rows : {kMlaBlockM, kMlaSwapAbRows, kMlaM16Rows}) {
      if (rows > own_rows || (rows < own_rows && !(rows == kMlaSwapAbRows ? swap_ab : m16))) continue;
      if (const KernelChoice other{rows, fewest}; time(other) < time(choice)) choice = other;
    }
  }
  return choice;
}

}  // namespace attune::cuda::mla
