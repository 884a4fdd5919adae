// SPDX-License-Identifier: Apache-2.0
// A plan's sizes follow from shapes: a run that has more of any is refused by name, and writes nothing.
#include <gmock/gmock.h>

#include "support.h"

namespace attune::tests {
namespace {

struct Larger {
  const char* name;
  const char* plan;
  const char* run;
  const char* message;
};

constexpr Larger kLarger[] = {
    {"batch", R"("kv": "paged", "seqlens_kv": [9, 9])", R"("kv": "paged", "seqlens_kv": [9, 9, 9])",
     "batch is 3; the plan was made for at most 2"},
    {"total_q", R"("seqlens_q": [5, 2], "seqlens_kv": [9, 9])", R"("seqlens_q": [5, 3], "seqlens_kv": [9, 9])",
     "total_q is 8; the plan was made for at most 7"},
    {"seqlen_q", R"("queries": "fixed", "seqlens_q": [16, 16, 16], "seqlens_kv": [20, 20, 20])",
     R"("queries": "fixed", "seqlens_q": [17, 17], "seqlens_kv": [20, 20])",
     "seqlen_q is 17; the plan was made for at most 16"},
    {"max_seqlen_kv", R"("queries": "fixed", "seqlens_q": [4, 4, 4], "seqlens_kv": [20, 20, 20])",
     R"("queries": "fixed", "seqlens_q": [4, 4], "seqlens_kv": [30, 30])",
     "max_seqlen_kv is 30; the plan was made for at most 20"},
    {"dense keys", R"("seqlens_q": [1, 1], "seqlens_kv": [9, 9])", R"("seqlens_q": [1, 1], "seqlens_kv": [9, 10])",
     "the number of dense keys is 19; the plan was made for at most 18"},
    {"beam_width", R"("kv": "paged", "seqlens_kv": [9, 9, 9, 9], "beam_width": 4, "beam_prompt": [2, 2, 2, 2])",
     R"("kv": "paged", "seqlens_kv": [9, 9, 9, 9], "beam_width": 2,
        "beam_prompt": [2, 2, 2, 2])",
     "beam_width is 2; the plan was made for 4"},
    {"topk", R"("kv": "slots", "seqlens_q": [2], "sparse": {"topk": 9})",
     R"("kv": "slots", "seqlens_q": [2], "sparse": {"topk": 10})",
     "indices: topk is 10; the plan was made for at most 9"},
    {"extra topk", R"("kv": "slots", "seqlens_q": [2], "sparse": {"topk": 9}, "extra": {"topk": 3})",
     R"("kv": "slots", "seqlens_q": [2], "sparse": {"topk": 8}, "extra": {"topk": 4})",
     "extra_indices: topk is 4; the plan was made for at most 3"},
    {"t5 buckets", R"("seqlens_q": [5], "seqlens_kv": [9], "t5_buckets": 8)",
     R"("seqlens_q": [5], "seqlens_kv": [9], "t5_buckets": 16)", "t5_bias.shape[1] is 16; the plan was made for 8"},
    {"head_dim_qk", R"("head_dim": [64, 32], "seqlens_q": [5], "seqlens_kv": [9])",
     R"("head_dim": [72, 32], "seqlens_q": [5], "seqlens_kv": [9])", "head_dim_qk is 72; the plan was made for 64"},
    {"head_dim_v", R"("head_dim": [64, 32], "seqlens_q": [5], "seqlens_kv": [9])",
     R"("head_dim": [64, 40], "seqlens_q": [5], "seqlens_kv": [9])", "head_dim_v is 40; the plan was made for 32"},
    {"num_heads_q", R"("heads": [4, 2], "seqlens_q": [5], "seqlens_kv": [9])",
     R"("heads": [6, 2], "seqlens_q": [5], "seqlens_kv": [9])", "num_heads_q is 6; the plan was made for 4"},
    {"q_rope", R"("head_dim": [64, 32], "q_rope": 16, "seqlens_q": [5], "seqlens_kv": [9])",
     R"("head_dim": [64, 32], "q_rope": 8, "seqlens_q": [5], "seqlens_kv": [9])",
     "q_rope.shape[-1] is 8; the plan was made for 16"},
    {"whole queries", R"("head_dim": [64, 32], "q_rope": 16, "seqlens_q": [5], "seqlens_kv": [9])",
     R"("head_dim": [64, 32], "seqlens_q": [5], "seqlens_kv": [9])",
     "attention differs from its plan: q_rope is absent; the plan was made with it"},
    {"q_rope too", R"("head_dim": [64, 32], "seqlens_q": [5], "seqlens_kv": [9])",
     R"("head_dim": [64, 32], "q_rope": 16, "seqlens_q": [5], "seqlens_kv": [9])",
     "attention differs from its plan: q_rope is given; the plan was made without it"},
    {"q dtype", R"("dtype": "f32", "seqlens_q": [5], "seqlens_kv": [9])", R"("seqlens_q": [5], "seqlens_kv": [9])",
     "attention differs from its plan: q.dtype is bfloat16; the plan was made for float32"},
    {"mask", R"("causal": true, "seqlens_q": [5], "seqlens_kv": [9])",
     R"("window": [3, -1], "seqlens_q": [5], "seqlens_kv": [9])",
     "attention differs from its plan: mask is window; the plan was made for causal"},
    {"num_heads_kv", R"("heads": [4, 2], "seqlens_q": [5], "seqlens_kv": [9])",
     R"("heads": [4, 4], "seqlens_q": [5], "seqlens_kv": [9])", "num_heads_kv is 4; the plan was made for 2"},
};

cases::Case case_of(std::string_view members) {
  return make_case(cases::Row(R"("dtype": "bf16", "heads": [4, 1])").with(members));
}

// What a run of `run` under a plan for `plan` says; it must leave out as it was.
std::string refusal_of(const attune_attention& planned, const cases::Problem& run, const attune_attention& a) {
  attune_plan* plan = nullptr;
  EXPECT_ATTUNE_OK(attune_plan_create(&planned, kCpu, &plan));
  size_t bytes = 0;
  EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  const cases::Snapshot before(run.arena());
  cases::Workspace workspace(cases::host_memory(), bytes);
  const attune_status status = attune_run(plan, &a, workspace.buffer.device(), bytes, nullptr);
  const std::string message = attune_last_error();
  EXPECT_EQ(status, ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(gather(before.after(run.host().out)), gather(run.device().out));
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
  return status == ATTUNE_OK ? "" : message;
}

class LargerRun : public testing::TestWithParam<Larger> {};
INSTANTIATE_TEST_SUITE_P(All, LargerRun, testing::ValuesIn(kLarger), [](const auto& info) {
  std::string name = info.param.name;
  for (char& c : name) c = c == ' ' ? '_' : c;
  return name;
});

TEST_P(LargerRun, IsRefusedByName) {
  const cases::Problem plan(case_of(GetParam().plan)), run(case_of(GetParam().run));
  EXPECT_THAT(refusal_of(plan.device(), run, run.device()), testing::StartsWith(GetParam().message));
}

TEST(PlanLimits, GivenMaximaAreLimitsToo) {
  const cases::Problem problem(case_of(R"("seqlens_q": [5, 2], "seqlens_kv": [9, 8])"));
  attune_attention plan = problem.device(), run = plan;
  plan.max_seqlen_q = 5, plan.max_seqlen_kv = 9;
  run.max_seqlen_q = 6, run.max_seqlen_kv = 9;
  EXPECT_THAT(refusal_of(plan, problem, run), testing::HasSubstr("max_seqlen_q is 6; the plan was made for at most 5"));
  run.max_seqlen_q = 5, run.max_seqlen_kv = 10;
  EXPECT_THAT(refusal_of(plan, problem, run),
              testing::HasSubstr("max_seqlen_kv is 10; the plan was made for at most 9"));
}

// As the issue that led here: as many rows, but other blocks of them.
TEST(PlanLimits, RowsOfOtherSequencesAreMore) {
  const cases::Problem plan(
      case_of(R"("queries": "fixed", "seqlens_q": [1024], "seqlens_kv": [1024], "heads": [1, 1])"));
  attune_attention a = plan.device();
  const auto shaped = [](attune_tensor t, int64_t batch, int64_t seqlen) {
    const int64_t shape[] = {batch, seqlen, t.shape[2], t.shape[3]};
    return attune_dense_tensor(nullptr, static_cast<attune_dtype>(t.dtype), 4, shape);
  };
  for (attune_tensor* t : {&a.q, &a.k, &a.v, &a.out}) *t = shaped(*t, 1024, 128);
  a.lse = a.max_logits = {};
  a.seqused_kv = {};
  const attune_attention planned = a;
  for (attune_tensor* t : {&a.q, &a.k, &a.v, &a.out}) {
    *t = shaped(*t, 1000, 131);
    t->data = plan.device().q.data;  // refused before it is read
  }
  EXPECT_THAT(refusal_of(planned, plan, a), testing::HasSubstr("seqlen_q is 131; the plan was made for at most 128"));
}

}  // namespace
}  // namespace attune::tests
