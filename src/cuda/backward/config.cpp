// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward/config.h"

#include <algorithm>
#include <limits>

#include "backward/mma/shared_bytes.h"
#include "core/dtype.h"
#include "core/integers.h"
#include "core/status.h"
#include "core/workspace.h"
#include "cuda/attention/params.h"
#include "cuda/attention/tensor_maps.h"
#include "cuda/attention/work_tiles.h"

namespace attune::cuda::backward {
namespace {

using attention::kAlignment;

constexpr int kLeastMmaRows = 32;

// Lays out the workspace, lists, statistics and flags, and returns its bytes. workspace null: only counts.
size_t lay_out(const Config& c, void* workspace, kernels::BackwardParams& k) {
  Workspace w(workspace);
  const auto take_list = [&](int64_t tiles) {
    std::byte* const list = w.take<std::byte>(static_cast<int64_t>(sizeof(kernels::BackwardList)) +
                                              tiles * static_cast<int64_t>(sizeof(kernels::BackwardTile)));
    return reinterpret_cast<kernels::BackwardList*>(list);
  };
  k.q_list = take_list(c.max_q_tiles);
  k.kv_list = take_list(c.max_kv_tiles);
  const int64_t rows = c.heads_q * c.stats_stride;
  k.stats = reinterpret_cast<char*>(w.take<std::byte>(rows * static_cast<int64_t>(c.row_stats_bytes())));
  k.dq_sums = w.take<float>(c.heads_q * c.dq_tiles * kernels::dq_tile_floats(c.head_dim_qk, c.head_dim_v));
  k.dq_semaphores = w.take<unsigned>(c.heads_q * c.dq_tiles);
  if (c.with_dsinks) k.sink_sums = w.take<float>(c.heads_q * c.sum_tiles);  // null: not wanted
  if (c.t5_entries > 0) k.t5_sums = w.take<float>(c.heads_q * c.t5_entries * c.sum_tiles);
  if (c.mma == MmaInstruction::kWgmma) {  // null with mma.sync: several blocks share the 128 rows of a flag
    k.q_nonfinite = w.take<int>(c.blocks(false));
    k.kv_nonfinite = w.take<int>(c.blocks(true));
  }
  return w.size();
}

kernels::GradientRows gradient_rows(const kernels::NewRows& rows, const RowView& v) {
  return {const_cast<char*>(rows.data), rows.batch_stride, rows.row_stride, rows.head_stride, rows.dim_stride, v.dtype};
}
kernels::GradientRows as_q(const Problem& p, const RowView& v) {
  return v ? gradient_rows(attention::new_rows(p, v), v) : kernels::GradientRows{};
}
kernels::GradientRows as_k(const RowView& v) {
  return v ? gradient_rows(attention::dense_rows(v), v) : kernels::GradientRows{};
}

struct Input {
  const char* name;
  const RowView& view;
};

template <class Body>
void for_each_input(const BackwardProblem& p, const Body& body) {
  for (const Input& input :
       {Input{"q", p.forward.q}, Input{"k", p.forward.k}, Input{"v", p.forward.v}, Input{"dout", p.dout}})
    body(input);
}

// The macros of a gradient kernel: those of the problem, and the kernel's own, `more`.
Defines with_defines(const Config& c, Defines more) {
  const Defines own = {define("ATTUNE_TYPE", c.dtype),
                       define("ATTUNE_HEAD_DIM_QK", c.head_dim_qk),
                       define("ATTUNE_HEAD_DIM_V", c.head_dim_v),
                       define("ATTUNE_SCORE", c.score),
                       define("ATTUNE_MASK", c.mask),
                       define("ATTUNE_SINK_SHARES", c.sink_shares() ? 1 : 0)};
  more.insert(more.end(), own.begin(), own.end());
  return more;
}

}  // namespace

const char* Config::name() const {
  if (mma == MmaInstruction::kWgmma) return "cuda_backward";
  return dtype == ATTUNE_FLOAT32 ? "cuda_backward_fp32" : "cuda_backward_mma";
}

// Takes the shape with the most resident warps, which hide each other's latency; then the largest, which copies least.
Config::MmaShape Config::mma_shape(int outputs) const {
  constexpr int64_t kReservedSharedBytes = 1024;  // of each block, by the system
  // Warps that registers allow a multiprocessor: a thread has up to 255, or 168.
  const int most_warps = (outputs & kernels::kGradientTables) != 0 && element_size() == 2 ? 12 : 8;
  MmaShape best{};
  for (const MmaShape shape : {MmaShape{4, 32, 0}, MmaShape{4, 16, 0}, MmaShape{2, 32, 0}, MmaShape{2, 16, 0}}) {
    const int64_t bytes = kernels::mma_backward_shared_bytes(head_dim_qk, head_dim_v, outputs, shape.rows(), shape.tile,
                                                             static_cast<int>(row_stats_bytes()), element_size());
    if (bytes > limits.shared_bytes_per_block) continue;
    const int blocks = static_cast<int>(
        std::min<int64_t>(limits.shared_bytes_per_sm / (bytes + kReservedSharedBytes), most_warps / shape.warps));
    if (blocks * shape.warps > best.blocks_per_sm * best.warps) best = {shape.warps, shape.tile, blocks};
  }
  return best;
}

// Two stages let the next tile be copied while this one is multiplied. vdo has one only where shared memory is too
// small.
Config::Stages Config::stages(int outputs) const {
  const int most = tile() == 32 ? 3 : std::max(head_dim_qk, head_dim_v) > 64 ? 2 : 4;
  constexpr int kMostSharedBytes = 227 * 1024;
  for (const Stages s : {Stages{most, most}, Stages{2, 2}}) {
    if (shared_bytes(outputs, s) <= kMostSharedBytes) return s;
  }
  return {2, 1};
}

int Config::shared_bytes(int outputs, const Stages& s) const {
  return kernels::backward_shared_bytes(head_dim_qk, head_dim_v, outputs, s.qk, s.vdo,
                                        static_cast<int>(row_stats_bytes()));
}

KernelSpec Config::schedule_kernel() const { return {"backward/schedule.cu", "attune_backward_schedule", {}, 0}; }
KernelSpec Config::row_stats_kernel() const {
  return {"backward/row_stats.cu",
          "attune_backward_row_stats",
          {define("ATTUNE_TYPE", dtype), define("ATTUNE_HEAD_DIM_V", head_dim_v),
           define("ATTUNE_WITH_SINKS", with_sinks ? 1 : 0), define("ATTUNE_SINK_SHARES", sink_shares() ? 1 : 0)},
          0};
}
KernelSpec Config::gradients_kernel(int outputs) const {
  const Stages s = stages(outputs);
  return {"backward/gradients.cu", "attune_backward_gradients",
          with_defines(*this, {define("ATTUNE_GRADIENTS", outputs), define("ATTUNE_QK_STAGES", s.qk),
                               define("ATTUNE_VDO_STAGES", s.vdo)}),
          static_cast<size_t>(shared_bytes(outputs, s))};
}
KernelSpec Config::mma_kernel(int outputs) const {
  const MmaShape s = mma_shape(outputs);
  const char* const source = outputs == kernels::kGradientDbias     ? "backward/dbias.cu"
                             : outputs == kernels::kGradientDt5Bias ? "backward/dt5_bias.cu"
                                                                    : "backward/gradients_mma.cu";
  const char* const entry = outputs == kernels::kGradientDbias     ? "attune_backward_dbias"
                            : outputs == kernels::kGradientDt5Bias ? "attune_backward_dt5_bias"
                                                                   : "attune_backward_gradients_mma";
  return {source, entry,
          with_defines(*this, {define("ATTUNE_GRADIENTS", outputs), define("ATTUNE_WARPS", s.warps),
                               define("ATTUNE_TILE", s.tile), define("ATTUNE_BLOCKS_PER_SM", s.blocks_per_sm)}),
          static_cast<size_t>(kernels::mma_backward_shared_bytes(head_dim_qk, head_dim_v, outputs, s.rows(), s.tile,
                                                                 static_cast<int>(row_stats_bytes()), element_size()))};
}
KernelSpec Config::store_dq_kernel() const {
  return {"backward/store_dq.cu",
          "attune_backward_store_dq",
          {define("ATTUNE_HEAD_DIM_QK", head_dim_qk), define("ATTUNE_HEAD_DIM_V", head_dim_v),
           define("ATTUNE_MASK", mask & use::kRanges)},
          0};
}
KernelSpec Config::recompute_kernel(bool of_keys) const {
  return {"backward/recompute.cu", "attune_backward_recompute",
          with_defines(*this, {define("ATTUNE_OF_KEYS", of_keys ? 1 : 0)}), 0};
}
KernelSpec Config::sum_blocks_kernel() const { return {"backward/sum_blocks.cu", "attune_backward_sum_blocks", {}, 0}; }
int64_t Config::dbias_blocks(const TableView& dbias) const {
  if (!dbias) return 0;
  const MmaShape s = mma_shape(kernels::kGradientDbias);
  if (s.warps == 0) return 0;  // heads of more channels than any kernel takes
  return ceil_div(dbias.shape[1], s.rows()) * ceil_div(dbias.shape[2], kernels::kDbiasTiles * s.tile) * dbias.shape[0];
}

std::vector<Launch> launches(const Config& c) {
  std::vector<Launch> list = {{c.schedule_kernel(), 2, Config::kScheduleThreads}};
  list.push_back({c.row_stats_kernel(), c.blocks(false), Config::kRowThreads});
  const auto add = [&](int outputs) {
    list.push_back({c.gradients_kernel(outputs), c.blocks(outputs != kernels::kGradientDq), Config::kThreads,
                    Arguments::kMaps, outputs});
  };
  const auto add_mma = [&](int outputs) {
    const Config::MmaShape shape = c.mma_shape(outputs);
    list.push_back({c.mma_kernel(outputs),
                    c.blocks(outputs != kernels::kGradientDq) * (kernels::kBackwardRows / shape.rows()),
                    32 * shape.warps});
  };
  const bool with_dq = (c.gradients & kernels::kGradientDq) != 0;
  if (c.mma == MmaInstruction::kMmaSync) {
    const int of_keys = c.gradients & kernels::kGradientDkDv;
    const bool together =
        of_keys == kernels::kGradientDkDv && kernels::mma_has_dk_beside_dv(c.head_dim_qk, c.head_dim_v);
    if (with_dq) add_mma(kernels::kGradientDq);
    for (const int outputs : {kernels::kGradientDk, kernels::kGradientDv}) {
      if (!together && (of_keys & outputs) != 0) add_mma(outputs);
    }
    if (together) add_mma(of_keys);
  } else if (c.has_one_pass()) {
    if (c.gradients != 0) add(with_dq ? kernels::kGradients : kernels::kGradientDkDv);
    if (with_dq) list.push_back({c.store_dq_kernel(), c.blocks(false), Config::kRowThreads});
  } else {
    for (const int outputs : {kernels::kGradientDq, kernels::kGradientDk, kernels::kGradientDv}) {
      if ((c.gradients & outputs) != 0) add(outputs);
    }
  }
  if (with_dq) list.push_back({c.recompute_kernel(false), c.blocks(false), Config::kRowThreads});
  if ((c.gradients & kernels::kGradientDkDv) != 0)
    list.push_back({c.recompute_kernel(true), c.blocks(true), Config::kRowThreads});
  const auto add_sum = [&](int outputs, int64_t entries) {
    list.push_back({c.sum_blocks_kernel(), entries, Config::kRowThreads, Arguments::kBlockSum, outputs});
  };
  if (c.with_dsinks) add_sum(kernels::kGradientDsinks, c.heads_q);
  if (c.with_dbias) {
    const int outputs = kernels::kGradientDbias;
    list.push_back({c.mma_kernel(outputs), 0, 32 * c.mma_shape(outputs).warps, Arguments::kParams, outputs});
  }
  if (c.t5_entries > 0) {
    const int outputs = kernels::kGradientDt5Bias;
    list.push_back(
        {c.mma_kernel(outputs), c.blocks(false), 32 * c.mma_shape(outputs).warps, Arguments::kParams, outputs});
    add_sum(outputs, c.heads_q * c.t5_entries);
  }
  return list;
}

int64_t blocks_of_run(const Launch& launch, const Config& c, const BackwardProblem& p) {
  return launch.outputs == kernels::kGradientDbias ? c.dbias_blocks(p.dbias) : launch.blocks;
}

size_t Config::workspace_bytes() const {
  kernels::BackwardParams k{};
  return lay_out(*this, nullptr, k);
}

namespace {

Config configure(const BackwardProblem& p, MmaInstruction mma, const DeviceLimits& limits) {
  const Problem& f = p.forward;
  constexpr int64_t kRows = kernels::kBackwardRows;
  Config c;
  c.mma = mma;
  c.limits = limits;
  c.head_dim_qk = to_int(f.head_dim_qk);
  c.head_dim_v = to_int(f.head_dim_v);
  c.dtype = f.q.dtype;
  c.heads_q = f.heads_q;
  c.heads_kv = f.heads_kv;
  c.max_q_tiles = f.cu_q ? f.total_q / kRows + f.batch : f.batch * ceil_div(f.fixed_q, kRows);
  c.max_kv_tiles = f.k.rows / kRows + f.batch;  // runs may have fewer sequences of more keys each
  // Each sequence begins at an even row, and a tile may reach beyond the last row.
  c.stats_stride = round_up(f.total_q + f.batch + kRows, 2);
  c.gradients =
      (p.dq ? kernels::kGradientDq : 0) | (p.dk ? kernels::kGradientDk : 0) | (p.dv ? kernels::kGradientDv : 0);
  if (p.dq && c.has_one_pass()) c.dq_tiles = f.total_q / c.tile() + f.batch;
  c.score = attention::score_kinds(f), c.mask = attention::mask_kinds(f);
  c.t5 = attention::t5_buckets(f);
  c.with_sinks = static_cast<bool>(f.sinks), c.with_dsinks = static_cast<bool>(p.dsinks);
  c.with_dlse = static_cast<bool>(p.dlse);
  c.with_dbias = static_cast<bool>(p.dbias);
  if (p.dt5_bias) c.t5_entries = p.dt5_bias.shape[2];
  c.sum_tiles = f.total_q / kRows + f.batch;
  return c;
}

// What the kernels of neither instruction take.
std::string refusal_of(const BackwardProblem& p, const Config& c) {
  const Problem& f = p.forward;
  if (f.k.dtype != f.q.dtype || f.v.dtype != f.q.dtype || f.out.dtype != f.q.dtype)
    return "q, k, v and out of different dtypes";
  if (std::string why = attention::table_refusal(f); !why.empty()) return why;
  constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();
  if (c.dbias_blocks(p.dbias) > kMostBlocks) return "more than 2^31 blocks of entries of dbias";
  const int64_t slices =
      c.mma == MmaInstruction::kMmaSync ? kernels::kBackwardRows / kLeastMmaRows : 1;  // blocks of a work tile
  if (std::max(c.blocks(false), c.blocks(true)) * slices > kMostBlocks)
    return cat("more than 2^31 blocks of ", kernels::kBackwardRows / slices, " rows and heads");
  return "";
}

std::string refusal_of_rows(const BackwardProblem& p) {
  std::string why;
  for_each_input(p, [&](const Input& input) {
    if (why.empty() && !attention::strides_fit(input.view))
      why = cat("rows of ", input.name, " that do not lie at multiples of 16 bytes, or whose channels are apart");
  });
  return why;
}

}  // namespace

Config choose_config(const BackwardProblem& p) { return configure(p, MmaInstruction::kWgmma, {}); }
Config choose_mma_config(const BackwardProblem& p, const DeviceLimits& limits) {
  return configure(p, MmaInstruction::kMmaSync, limits);
}

std::string refusal(const BackwardProblem& p) {
  std::string why = refusal_of(p, choose_config(p));
  return why.empty() ? refusal_of_rows(p) : why;
}
std::string mma_refusal(const BackwardProblem& p) { return refusal_of(p, choose_mma_config(p, {})); }

void check_run(const BackwardProblem& p, const Config& c) {
  require(
      !p.dlse || c.with_dlse || !c.with_sinks,
      "attention_backward differs from its plan: dlse is given, but was absent; beside sinks it changes the kernels");
  attention::check_ranges(p.forward, c.mask);
  const std::string why = c.mma == MmaInstruction::kMmaSync ? mma_refusal(p) : refusal(p);
  require(why.empty(), "attention_backward differs from its plan: kernel ", c.name(), " does not take ", why);
  if (c.mma == MmaInstruction::kMmaSync) return;
  for_each_input(p, [](const Input& input) {
    const size_t over = reinterpret_cast<uintptr_t>(input.view.data) % kAlignment;
    require(over == 0, input.name, ".data is ", over,
            " bytes beyond a multiple of 16; kernel cuda_backward needs a multiple of 16");
  });
}

kernels::BackwardParams to_params(const BackwardProblem& p, const Config& c, void* workspace) {
  const Problem& f = p.forward;
  kernels::BackwardParams k{};
  static_cast<kernels::WorkTileParams&>(k) = attention::to_params(f, c.t5, {}, nullptr);
  k.new_k = attention::dense_rows(f.k), k.new_v = attention::dense_rows(f.v);
  k.dout = as_q(f, p.dout), k.dq = as_q(f, p.dq);
  k.dk = as_k(p.dk), k.dv = as_k(p.dv);
  if (p.dlse) {
    const kernels::NewRows rows = attention::new_rows(f, p.dlse);
    k.dlse = reinterpret_cast<const float*>(rows.data);
    k.dlse_batch_stride = rows.batch_stride, k.dlse_row_stride = rows.row_stride;
    k.dlse_head_stride = rows.head_stride;
  }
  k.stats_stride = c.stats_stride;
  const auto takes_vectors = [](const RowView& v) {
    return attention::strides_fit(v) && reinterpret_cast<uintptr_t>(v.data) % kAlignment == 0;
  };
  k.stats_vectors =
      f.q.element_size == 2 && f.head_dim_v % 8 == 0 && takes_vectors(f.out) && takes_vectors(p.dout) ? 1 : 0;
  k.dq_tiles = to_int(c.dq_tiles);
  k.max_q_tiles = to_int(c.max_q_tiles), k.max_kv_tiles = to_int(c.max_kv_tiles);
  k.t5_entries = to_int(c.t5_entries);
  if (p.dbias) {
    k.dbias = p.dbias.data;
    k.dbias_heads = to_int(p.dbias.shape[0]);
    k.dbias_head_stride = p.dbias.stride[0], k.dbias_row_stride = p.dbias.stride[1];
    k.dbias_column_stride = p.dbias.stride[2];
  }
  lay_out(c, workspace, k);
  return k;
}

kernels::BlockSumParams block_sum_params(const BackwardProblem& p, const kernels::BackwardParams& k, int outputs) {
  kernels::BlockSumParams sums{};
  static_cast<kernels::BackwardParams&>(sums) = k;
  if (outputs == kernels::kGradientDsinks) {
    sums.sums = k.sink_sums, sums.factor = -1;
    sums.to = p.dsinks.data, sums.to_head_stride = p.dsinks.stride[2];
    sums.entries = 1;
  } else {
    sums.sums = k.t5_sums, sums.factor = 1;
    sums.to = p.dt5_bias.data;
    sums.to_head_stride = p.dt5_bias.stride[1], sums.to_entry_stride = p.dt5_bias.stride[2];
    sums.entries = k.t5_entries;
  }
  return sums;
}

Maps describe_maps(const BackwardProblem& p, const Config& c, int outputs) {
  const Problem& f = p.forward;
  const bool of_queries = outputs == kernels::kGradientDq;
  const auto rows = [&](bool own) { return own ? kernels::kBackwardRows : c.tile(); };
  const auto q_side = [&](const RowView& v, int64_t head_dim) {
    TensorMapDesc m = attention::row_map(f, v, f.heads_q, head_dim, rows(of_queries), 1);
    if (m.data == nullptr) m.data = f.k.data;  // no queries: what is not read must be a map all the same
    return m;
  };
  const auto k_side = [&](const RowView& v, int64_t head_dim) {
    TensorMapDesc m = attention::row_map(f, v, f.heads_kv, head_dim, rows(!of_queries), 1);
    if (m.data == nullptr) m.data = f.q.data;  // no keys
    return m;
  };
  const TensorMapDesc k = k_side(f.k, f.head_dim_qk), v = k_side(f.v, f.head_dim_v), q = q_side(f.q, f.head_dim_qk),
                      dout = q_side(p.dout, f.head_dim_v);
  return of_queries ? Maps{q, dout, k, v} : Maps{k, v, q, dout};
}

}  // namespace attune::cuda::backward
