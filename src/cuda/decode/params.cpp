// SPDX-License-Identifier: Apache-2.0
// From a problem to the kernels' flat parameters.
#include <algorithm>

#include "common/work_tile_params.h"
#include "core/integers.h"
#include "core/workspace.h"
#include "cuda/attention/params.h"
#include "cuda/decode/config.h"
#include "cuda/ops/params.h"

namespace attune::cuda::decode {
namespace {

using kernels::AttentionParams;

void fill_new_tokens(const Problem& p, AttentionParams& k) {
  if (p.new_tokens) {
    k.new_k = attention::new_rows(p, p.k);
    k.new_v = attention::new_rows(p, p.v);
  }
  k.v_is_k = p.v_aliases_k ? 1 : 0;
  k.prologue = ops::prologue_params(p.prologue);
  k.append = p.prologue.append ? 1 : 0;
}

// Measured: a tile of 128 keys and 128 rows of a prompt takes so many times as long as one of a decode block.
constexpr float kPromptTile = 1.22f;

void fill_schedule(const Problem& p, const Config& c, AttentionParams& k) {
  k.blocks = c.blocks / c.head_lanes;
  k.head_lanes = c.head_lanes;
  k.max_decode_q = c.beside.max_decode_q;
  k.prompt_tile = kPromptTile * c.beside.tile * 128 / static_cast<float>(c.warps * kernels::kKeysOfWarp);
  k.row_blocks = to_int(ceil_div(std::max<int64_t>(1, p.max_seqlen_q) * p.group, c.rows()));
}

// Lays out the workspace, the schedule and partial outputs, and returns its bytes. workspace null: only counts.
size_t lay_out(const Config& c, void* workspace, AttentionParams& k) {
  Workspace w(workspace);
  const int64_t blocks = c.blocks, rows = 2 * blocks * c.rows();
  k.stream_k = w.take<kernels::StreamKRange>(blocks);
  k.arrivals = w.take<unsigned>(blocks);
  if (c.append_counters > 0) k.tiles_done = w.take<unsigned>(c.append_counters);
  k.partial_stats = w.take<float>(rows * 2);
  k.partial_out = w.take<float>(rows * c.head_dim_v);
  return w.size();
}

}  // namespace

size_t Config::workspace_bytes() const {
  AttentionParams k{};
  return lay_out(*this, nullptr, k);
}

AttentionParams to_params(const Problem& p, const Config& c, void* workspace) {
  AttentionParams k{};
  attention::fill_problem(p, c.t5, k);
  fill_new_tokens(p, k);
  fill_schedule(p, c, k);
  lay_out(c, workspace, k);
  if (c.beside.list_at != 0) {
    auto& list = *reinterpret_cast<kernels::WorkList*>(static_cast<std::byte*>(workspace) + c.beside.list_at);
    k.prompt_tiles = &list.num_key_tiles, k.decode_begun = &list.decode_begun;
  }
  return k;
}

}  // namespace attune::cuda::decode
