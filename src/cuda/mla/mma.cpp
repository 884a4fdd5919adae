// SPDX-License-Identifier: Apache-2.0
// What the MLA kernel of GPUs without wgmma (kernels/mla/mma.cu) is compiled for.
#include <algorithm>

#include "core/integers.h"
#include "cuda/mla/config.h"
#include "cuda/mla/kernel_choice.h"
#include "mla/mma/shared_bytes.h"

namespace attune::cuda::mla {
namespace {

constexpr int kMostStages = 4;
constexpr int kFewestKeysOfSplit = 128;
// Rows of queries and keys of a tile, widest first: more rows read a key once for more of them, longer tiles have fewer
// barriers.
constexpr struct { int rows, keys; } kShapes[] = {{64, 32}, {32, 32}, {32, 16}, {16, 32}, {16, 16}};

}  // namespace

Config choose_mma_config(const Problem& p, int num_sms, int64_t shared_bytes) {
  Config c;
  c.mma = true;
  c.head_dim_qk = static_cast<int>(p.head_dim_qk);
  c.dtype = p.q.dtype;
  c.out_dtype = p.out.dtype;
  c.producer = choose_producer(p);
  if (c.producer == kernels::kMlaTma) c.producer = kernels::kMlaGather;
  c.sparse = p.sparse;
  c.dense = p.dense_kv || p.new_tokens;
  c.partials = {kernels::kMlaBlockM, kernels::kMlaPartialStats, kernels::kMlaHeadDimV, true};

  const int64_t tokens = tokens_of_keys(p), rows = p.group * tokens;  // that see the same keys
  for (const auto& shape : kShapes) {
    c.rows = shape.rows, c.keys = shape.keys, c.stages = kMostStages;
    while (c.stages > 0 && static_cast<int64_t>(c.shared_bytes()) > shared_bytes) --c.stages;
    const bool half_is_enough = rows <= shape.rows / 2 && shape.rows > 16;
    if (c.stages >= kernels::mla_mma_fewest_stages(c.producer) && !half_is_enough) break;
  }
  c.heads_of_tile = attention::choose_heads_of_tile(p.group, c.rows, tokens);
  c.tokens_of_tile = p.sparse ? 1 : c.rows / c.heads_of_tile;
  c.fewest_tiles = c.whole_tiles = kFewestKeysOfSplit / c.keys;
  attention::choose_grid(p, num_sms, c);
  c.count_row_pairs(p, num_sms);
  return c;
}

}  // namespace attune::cuda::mla
