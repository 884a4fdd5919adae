// SPDX-License-Identifier: Apache-2.0
// What every kind of layer owns: its pool, parameters, synthetic rows, plans and their workspace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attune/attune.hpp"
#include "batch_tables.h"
#include "descriptors.h"
#include "device_mirror.h"
#include "kv_pool.h"
#include "layer_runner.h"
#include "page_allocator.h"
#include "synthetic.h"

namespace attune::cli {

// A plan and what it is for.
struct NamedPlan {
  std::string name;
  Plan plan;
};

class LayerState {
 public:
  explicit LayerState(const RunnerConfig& c)
      : config(c),
        random(c.seed),
        max_pages(pages_for(c.limits.max_seqlen, c.limits.page_size)),
        parameters(c.model, c.limits.max_seqlen, random),
        pool(c.model, c.kv_dtype, c.limits.page_size, c.limits.num_pages),
        mirror(c.device),
        q(activation_dtype(c.kv_dtype), pool_rows(), c.model.num_heads_q, c.model.head_dim_qk, q_deviation(), random),
        k(activation_dtype(c.kv_dtype), pool_rows(), c.model.num_heads_kv, c.model.head_dim_qk, 1.0, random),
        out(static_cast<size_t>(pool_rows() * c.model.num_heads_q * c.model.head_dim_v *
                                cases::element_size(activation_dtype(c.kv_dtype)))) {
    if (c.limits.decode_only) pool.fill(random);
    if (!c.model.is_mla()) {
      v.emplace(activation_dtype(c.kv_dtype), pool_rows(), c.model.num_heads_kv, c.model.head_dim_v, 1.0, random);
    }
  }

  void add_plan(std::string name, const attune_attention& a) {
    plans.push_back({std::move(name), Plan(a, config.device)});
    workspace_bytes = std::max(workspace_bytes, plans.back().plan.workspace_size());
  }
  void allocate_workspace() { workspace = Buffer(workspace_bytes); }
  // Seconds that the call took.
  double run(size_t plan, const attune_attention& a) {
    return mirror.run(plans[plan].plan.get(), a, workspace.data(), workspace.size());
  }

  // Points q, k, v at synthetic rows and out at its buffer, for the rows that the descriptor has.
  void set_rows(attune_attention& a) {
    a.q = q.take(a.q.shape[0], random);
    a.out.data = out.data();
    set_new_tokens(a);
  }
  template <typename Descriptor>
  void set_new_tokens(Descriptor& d) {
    if (d.k.dtype != ATTUNE_DTYPE_NONE) d.k = k.take(d.k.shape[0], random);
    if (d.v.dtype != ATTUNE_DTYPE_NONE) d.v = v->take(d.v.shape[0], random);
  }
  template <typename Descriptor>
  static void set_tables(Descriptor& d, const BatchTables& tables) {
    d.cu_seqlens_q = tables.cu_seqlens();
    d.seqused_kv = tables.seqused();
    d.cache.page_table = tables.page_table();
  }

  std::vector<std::string> describe() const {
    std::vector<std::string> texts;
    for (const NamedPlan& p : plans) texts.push_back((p.name.empty() ? "" : p.name + ": ") + p.plan.describe());
    return texts;
  }

  RunnerConfig config;
  cases::Random random;
  int64_t max_pages;
  LayerParameters parameters;
  KvPool pool;
  DeviceMirror mirror;
  RowPool q, k;
  std::optional<RowPool> v;
  Buffer out, workspace;
  std::vector<NamedPlan> plans;
  size_t workspace_bytes = 0;

 private:
  int64_t pool_rows() const { return std::max(config.limits.max_rows, config.limits.max_encode_rows); }
  // Scores get a deviation of about 1, as in trained models, whatever the model's scale is.
  double q_deviation() const {
    return 1.0 / (config.model.scale() * std::sqrt(static_cast<double>(config.model.head_dim_qk)));
  }
};

}  // namespace attune::cli
