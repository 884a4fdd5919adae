// SPDX-License-Identifier: Apache-2.0
#include "cuda/indexer/params.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/integers.h"
#include "cuda/ops/params.h"

namespace attune::cuda::indexer {
namespace {

using ops::int_table;
using ops::row_tensor;

// Dividends are below 2^31: a larger divisor gives 0, as 2^31 does.
kernels::Divisor divisor_of(int64_t x) {
  return kernels::make_divisor(static_cast<unsigned>(std::clamp<int64_t>(x, 1, int64_t{1} << 31)));
}

kernels::IndexScoreRows score_rows(const IndexerProblem& op, const Layout& layout, void* workspace) {
  kernels::IndexScoreRows s{};
  if (op.kind == ATTUNE_INDEXER_TOPK) {
    s.data = static_cast<char*>(workspace) + layout.scores;
    s.row_stride = layout.columns * 4;
    s.column_stride = 4;
    s.in_workspace = 1;
    return s;
  }
  const kernels::RowTensor t = row_tensor(op.scores);
  return {t.data, t.outer_stride, t.row_stride, t.head_stride, 0};
}

}  // namespace

kernels::IndexRows index_rows(const IndexerProblem& op, const Layout& layout, void* workspace, int64_t first,
                              int64_t count) {
  kernels::IndexRows r{};
  r.total = op.total_q;
  r.rows_per_outer = to_int((op.reads_keys() ? op.q : op.scores).rows_per_batch);
  r.by_outer = divisor_of(r.rows_per_outer);
  r.first = first, r.count = count;
  r.fixed = to_int(std::max<int64_t>(op.fixed_q, 1));
  r.by_fixed = divisor_of(r.fixed);
  r.batch = to_int(op.batch);
  r.causal = op.causal ? 1 : 0;
  r.cu_seqlens = int_table(op.cu);
  r.seqused = int_table(op.seqused);
  r.key_begin = int_table(op.key_begin);
  r.key_end = int_table(op.key_end);
  r.max_seqlen_kv = to_int(op.max_seqlen_kv);
  r.has_cache = op.cache ? 1 : 0;
  r.cache = ops::row_cache(op.cache);
  r.by_page = divisor_of(op.cache.page_size);
  if (op.cu) {
    r.offsets = static_cast<int*>(workspace);
    r.owners = reinterpret_cast<int*>(static_cast<char*>(workspace) + layout.owners);
  }
  return r;
}

kernels::IndexScoresParams scores_params(const IndexerProblem& op, const ScoresConfig& c, const Layout& layout,
                                         void* workspace, int64_t first, int64_t count, int num_sms) {
  constexpr int64_t kTilesPerSm = 4;
  kernels::IndexScoresParams k{};
  k.rows = index_rows(op, layout, workspace, first, count);
  k.q = row_tensor(op.q);
  k.q_scale = row_tensor(op.q_scale);
  k.weights = row_tensor(op.weights);
  k.heads = to_int(op.num_heads);
  k.head_dim = to_int(op.head_dim);
  k.scores = score_rows(op, layout, workspace);
  k.num_columns = to_int(op.num_columns);
  k.clear = op.clear_scores ? 1 : 0;
  k.most_kept = op.kind == ATTUNE_INDEXER_TOPK ? to_int(op.topk) : -1;
  const int64_t columns = k.clear != 0 ? op.num_columns : op.max_seqlen_kv;
  k.key_blocks = to_int(ceil_div(columns, c.block_keys()));
  k.by_key_blocks = divisor_of(k.key_blocks);
  k.pack = divisor_of(k.rows.cache.k.pack);
  int64_t tile = 1;
  if (!c.exact) {
    // Rows of a tile share its keys, so as many as a sequence may have; but all multiprocessors need work.
    const int64_t rows_of_sequence = op.cu ? op.total_q / std::max<int64_t>(op.batch, 1) : op.fixed_q;
    tile = static_cast<int64_t>(
        std::bit_floor(static_cast<uint64_t>(std::clamp<int64_t>(rows_of_sequence, 1, kernels::kIndexTileRows))));
    while (tile > 1 && ceil_div(count, tile) * k.key_blocks < kTilesPerSm * num_sms) tile /= 2;
  }
  k.tile_rows = static_cast<int>(tile);
  k.num_tiles = ceil_div(count, tile) * k.key_blocks;
  return k;
}

kernels::IndexSelectParams select_params(const IndexerProblem& op, const Layout& layout, void* workspace, int64_t first,
                                         int64_t count) {
  kernels::IndexSelectParams k{};
  k.rows = index_rows(op, layout, workspace, first, count);
  k.scores = score_rows(op, layout, workspace);
  k.indices = row_tensor(op.indices);
  k.topk = to_int(op.topk);
  k.topk_length = op.topk_length;
  k.topk_length_stride = op.topk_length_stride;
  k.slots = op.slots ? 1 : 0;
  k.slot_table = int_table(op.slot_table);
  k.slot_page_size = to_int(op.slot_page_size);
  k.by_slot_page = divisor_of(op.slot_page_size);
  k.slot_pages = to_int(op.slot_pages);
  return k;
}

}  // namespace attune::cuda::indexer
