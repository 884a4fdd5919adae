// SPDX-License-Identifier: Apache-2.0
#include "core/plan_limits.h"

namespace attune {

PlanLimits plan_limits(const Problem& p) {
  constexpr auto kSame = PlanLimit::Rule::kSame, kAtMost = PlanLimit::Rule::kAtMost;
  return {{
      {"head_dim_qk", kSame, p.head_dim_qk},
      {"head_dim_v", kSame, p.head_dim_v},
      {"q_rope.shape[-1]", kSame, p.dim_q_rope},
      {"num_heads_q", kSame, p.heads_q},
      {"num_heads_kv", kSame, p.heads_kv},
      {"t5_bias.shape[1]", kSame, p.t5_num_buckets},
      {"t5_max_distance", kSame, p.t5_max_distance},
      {"t5_bidirectional", kSame, p.t5_bidirectional},
      {"beam_width", kSame, p.beam_width},  // kernels count the readers of a cache by request: beam_width sequences
      {"batch", kAtMost, p.batch},
      {"total_q", kAtMost, p.total_q},
      // total_q alone does not bound the row blocks, as the last one of each sequence may be partial.
      {"seqlen_q", kAtMost, p.fixed_q},
      {"max_seqlen_q", kAtMost, p.max_seqlen_q},
      {"the number of dense keys", kAtMost, p.k.rows},
      {"indices: topk", kAtMost, p.list.topk},
      {"extra_indices: topk", kAtMost, p.extra_list.topk},
      {"max_seqlen_kv", kAtMost, p.max_seqlen_kv},
  }};
}

void check_limits(const PlanLimits& planned, const Problem& run) {
  const PlanLimits asked = plan_limits(run);
  for (int i = 0; i < kNumPlanLimits; ++i) {
    const PlanLimit& most = planned[i];
    const bool same = most.rule == PlanLimit::Rule::kSame;
    require(same ? asked[i].value == most.value : asked[i].value <= most.value, most.name, " is ", asked[i].value,
            "; the plan was made for ", same ? "" : "at most ", most.value);
  }
}

}  // namespace attune
