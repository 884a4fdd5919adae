// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/work_tiles.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/integers.h"
#include "core/workspace.h"
#include "cuda/attention/params.h"
#include "cuda/attention/tensor_maps.h"
#include "cuda/ops/params.h"

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

void choose_grid(const Problem& p, int num_sms, WorkTiles& c) {
  c.batch = p.batch;
  c.splits = !p.batch_invariant;
  // An upper bound: the last row block of each sequence may hold a single token.
  const int64_t tokens = c.tokens_of_tile;
  const int64_t row_blocks = p.cu_q ? p.total_q / tokens + p.batch : p.batch * ceil_div(p.fixed_q, tokens);
  const int64_t most = c.splits ? num_sms : row_blocks * (p.heads_q / c.heads_of_tile);
  c.max_work_tiles = row_blocks + num_sms;
  c.blocks = static_cast<int>(std::clamp<int64_t>(most, 1, num_sms));
}

int keys_of_box(const KvCache& cache, int keys) {
  const int power = keys & -keys;  // a key tile may have 96 keys: boxes of 32
  return cache.paged ? static_cast<int>(std::gcd<int64_t>(cache.page_size, power)) : power;
}

namespace {

// Lays out the workspace and returns its bytes. workspace null: only counts.
size_t lay_out(const WorkTiles& c, void* workspace, kernels::WorkTileParams& k) {
  Workspace w(workspace);
  const int64_t rows = c.splits ? 2 * c.blocks * c.partials.rows : 0;
  k.list = w.take<kernels::WorkList>(1);
  k.work_tiles = w.take<kernels::WorkTile>(c.max_work_tiles);
  k.block_begin = w.take<int>(c.batch + 1);
  k.splits_done = w.take<unsigned>(c.blocks);
  if (c.splits && c.partials.listed) k.split_tiles = w.take<kernels::WorkTile>(c.blocks);
  k.partial_stats = w.take<float>(rows * c.partials.stats);
  k.partial_out = w.take<float>(rows * c.partials.channels);
  return w.size();
}

}  // namespace

size_t WorkTiles::workspace_bytes() const {
  kernels::WorkTileParams k{};
  return lay_out(*this, nullptr, k);
}

KernelSpec schedule_kernel(const WorkTiles& c, bool sparse, bool balanced) {
  return {"scheduler/persistent.cu",
          "attune_schedule_prefill",
          {define("ATTUNE_KEYS", c.keys), define("ATTUNE_SPARSE", sparse ? 1 : 0),
           define("ATTUNE_BALANCED", balanced ? 1 : 0)},
          0};
}

kernels::WorkTileParams to_params(const Problem& p, const kernels::T5Table& t5, const WorkTiles& c, void* workspace) {
  const bool rows = p.dense_kv || p.new_tokens;
  kernels::WorkTileParams k{};
  fill_problem(p, t5, k);
  lay_out(c, workspace, k);
  k.cu_seqlens_kv = ops::int_table(p.cu_kv);
  k.total_kv = rows ? p.k.rows : 0;
  k.fixed_kv = to_int(p.fixed_kv);
  k.q_flat = p.q.rows_per_batch == 0 ? 1 : 0;
  k.kv_flat = p.k.rows_per_batch == 0 ? 1 : 0;
  k.dense = rows ? 1 : 0;
  k.cached = p.cache ? 1 : 0;
  k.box_shift = std::countr_zero(static_cast<unsigned>(keys_of_box(p.cache, c.keys)));
  k.heads_of_tile = c.heads_of_tile;
  k.tokens_of_tile = c.tokens_of_tile;
  k.num_head_tiles = to_int(p.heads_q / c.heads_of_tile);
  k.num_blocks = c.blocks;
  k.max_work_tiles = to_int(c.max_work_tiles);
  k.fewest_tiles = c.fewest_tiles;
  k.whole_tiles = c.whole_tiles;
  k.store_vectors = strides_fit(p.out) && reinterpret_cast<uintptr_t>(p.out.data) % kAlignment == 0 &&
                            p.out.element_size == 2 && p.head_dim_v % 8 == 0
                        ? 1
                        : 0;
  return k;
}

Misaligned find_misaligned(const Problem& p, bool copied, bool gathered) {
  Misaligned found;
  const auto check = [&](const char* name, const void* data) {
    const size_t over = reinterpret_cast<uintptr_t>(data) % kAlignment;
    if (over != 0 && found.name == nullptr) found = {name, over};
  };
  if (!copied) check("q.data", p.q.data);
  if (p.q_rope) check("q_rope.data", p.q_rope.data);
  if ((p.dense_kv || p.new_tokens) && !copied) check("k.data", p.k.data), check("v.data", p.v.data);
  if (p.cache && !gathered) check("cache.k.data", p.cache.k.data), check("cache.v.data", p.cache.v.data);
  if (p.extra_cache) check("extra_cache.k.data", p.extra_cache.k.data);
  return found;
}

std::string refusal_of(const Misaligned& m) {
  return m.name == nullptr ? "" : cat("data that do not lie at multiples of 16 bytes, as ", m.name, " here");
}

void check_aligned(const Misaligned& m, const char* kernel) {
  require(m.name == nullptr, m.name, " is ", m.over, " bytes beyond a multiple of 16; kernel ", kernel,
          " needs a multiple of 16, or a plan made for such data");
}

}  // namespace attune::cuda::attention
