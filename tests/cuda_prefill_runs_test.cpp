// SPDX-License-Identifier: Apache-2.0
// Plans of prompts on a GPU, run more than once: a captured graph replayed with other lengths, one schedule for several
// layers; and batches of more sequences than the schedule has threads. Skipped, with the reason, where there is no GPU.
#include <cstring>
#include <string>
#include <vector>

#include "cuda/prefill/prefill.h"
#include "cuda_cases.h"

namespace attune::cuda {
namespace {

class CudaPrefillRuns : public CudaCases {};

// The table on the host, which the oracle reads and the upload copies.
void set_table(const attune_tensor& t, const std::vector<int32_t>& values) {
  if (!values.empty()) std::memcpy(t.data, values.data(), values.size() * sizeof(int32_t));
}

// Lengths are read by the device alone: a graph that was captured with some is right with others. Every row belongs to
// a sequence, before and after.
TEST_F(CudaPrefillRuns, ReplayAGraphWithOtherLengths) {
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  struct Lengths {
    std::vector<int32_t> cu_q, cu_kv, used;
  };
  const std::vector<Lengths> dense = {{{0, 200, 200, 333}, {0, 300, 310, 700}, {}},
                                      {{0, 1, 330, 333}, {0, 1, 600, 700}, {}},
                                      {{0, 0, 0, 333}, {0, 0, 0, 700}, {}},
                                      {{0, 129, 330, 333}, {0, 5, 300, 303}, {}}};
  const std::vector<Lengths> cached = {{{0, 200, 200, 333}, {}, {300, 10, 390}},
                                       {{0, 1, 330, 333}, {}, {300, 10, 3}},
                                       {{0, 300, 332, 333}, {}, {0, 0, 0}},
                                       {{0, 129, 330, 333}, {}, {299, 9, 128}}};
  struct Call {
    const char* rest;
    const std::vector<Lengths>& lengths;
  };
  const cases::Row common(R"("name": "graph", "heads": [8, 2], "causal": true, "seqlens_q": [200, 0, 133],
      "seqlens_kv": [300, 10, 390], "poison": false, "max_logits": true)");
  for (const Call& call :
       {Call{R"("dtype": "bf16", "kv": "dense", "head_dim": [128, 128])", dense},
        {R"("dtype": "e4m3", "out_dtype": "bf16", "kv": "dense", "head_dim": [128, 128])", dense},
        {R"("dtype": "f32", "kv": "dense", "head_dim": [64, 64])", dense},
        {R"("dtype": "bf16", "kv": "dense", "head_dim": [100, 100])", dense},
        {R"("dtype": "bf16", "kv": "paged", "head_dim": [128, 128], "cache": {"page_size": 16})", cached},
        {R"("dtype": "bf16", "kv": "paged", "head_dim": [128, 128], "new_tokens": true,
            "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})",
         cached},
        {R"("dtype": "f32", "kv": "paged", "head_dim": [64, 64], "new_tokens": true)", cached}}) {
    cases::Problem problem(tests::make_case(common.with(call.rest)), memory);
    problem.arena().upload();
    const Problem p = make_problem(problem.device(), Data::kRequired);
    const auto plan = prefill::kernel_for(p).make_plan(p, kDevice);
    cases::Workspace workspace(memory, plan->workspace_size());
    const Graph graph(stream, [&] {
      plan->schedule(p, workspace.buffer.device(), stream.handle());
      plan->run(p, workspace.buffer.device(), stream.handle());
    });
    for (size_t i = 0; i <= call.lengths.size(); ++i) {
      const Lengths& x = call.lengths[i % call.lengths.size()];
      set_table(problem.host().cu_seqlens_q, x.cu_q);
      set_table(problem.host().cu_seqlens_kv, x.cu_kv);
      set_table(problem.host().seqused_kv, x.used);
      const cases::Expected expected = cases::evaluate(problem);
      problem.arena().upload();
      graph.replay(stream);
      stream.synchronize();
      EXPECT_EQ(cases::compare(problem, expected).failure, "") << call.rest << ", lengths " << i;
    }
  }
}

TEST_F(CudaPrefillRuns, ShareASchedule) {
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  const cases::Row common(R"("name": "layers", "heads": [8, 1], "head_dim": [128, 128], "kv": "dense",
      "causal": true)");
  for (const char* rest :
       {R"("dtype": "bf16", "seqlens_q": [2, 1, 70], "seqlens_kv": [9000, 40, 700])",
        R"("dtype": "bf16", "queries": "fixed", "seqlens_q": 300, "seqlens_kv": [300, 300],
                              "cu_seqlens_kv": false)",
        R"("dtype": "e4m3", "out_dtype": "bf16", "seqlens_q": [2, 1, 70], "seqlens_kv": [9000, 40, 700])",
        R"("dtype": "f32", "seqlens_q": [2, 1, 70], "seqlens_kv": [9000, 40, 700])"}) {
    cases::Problem problem(tests::make_case(common.with(rest)), memory);
    problem.arena().upload();
    const cases::Expected expected = cases::evaluate(problem);
    const Problem p = make_problem(problem.device(), Data::kRequired);
    const auto plan = prefill::kernel_for(p).make_plan(p, kDevice);
    cases::Workspace workspace(memory, plan->workspace_size());
    plan->schedule(p, workspace.buffer.device(), stream.handle());
    for (int layer = 0; layer < 5; ++layer) plan->run(p, workspace.buffer.device(), stream.handle());
    stream.synchronize();
    EXPECT_EQ(cases::compare(problem, expected).failure, "") << rest;
  }
}

TEST_F(CudaPrefillRuns, OfLargeBatches) {
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  const cases::Row common(R"("name": "batch", "heads": [2, 1], "head_dim": [64, 64], "causal": true, "batch": 3000,
      "seqlens_q": {"random": [0, 9], "seed": 1})");
  for (const char* rest : {R"("dtype": "bf16", "kv": "dense", "cu_seqlens_kv": false)",
                           R"("dtype": "f16", "kv": "paged", "new_tokens": true, "cache": {"page_size": 16},
                              "seqlens_kv": {"random": [0, 40], "seed": 2})"}) {
    cases::Problem problem(tests::make_case(common.with(rest)), memory);
    problem.arena().upload();
    const cases::Expected expected = cases::evaluate(problem);
    const Problem p = make_problem(problem.device(), Data::kRequired);
    const auto plan = prefill_kernel().make_plan(p, kDevice);
    cases::Workspace workspace(memory, plan->workspace_size());
    plan->schedule(p, workspace.buffer.device(), stream.handle());
    plan->run(p, workspace.buffer.device(), stream.handle());
    stream.synchronize();
    EXPECT_EQ(cases::compare(problem, expected).failure, "") << rest;
  }
}

}  // namespace
}  // namespace attune::cuda
