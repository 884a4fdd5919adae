// SPDX-License-Identifier: Apache-2.0
// Calls with prompts and sequences of a few queries on a GPU, each sequence by its kernel: every case of the table that
// both kernels cover, against the oracle; a captured graph replayed with other lengths; one schedule for several
// layers. Skipped, with the reason, where there is no GPU.
#include <algorithm>
#include <cstring>

#include "cuda/mixed/mixed.h"
#include "cuda_cases.h"

namespace attune::cuda {
namespace {

constexpr int kRandomMixedCasesOnCuda = 300;

bool covered(const attune_attention& a, const Problem& p) {
  return mixed_kernel().coverage.difference(traits_of(p, a)).empty() && mixed_kernel().refusal(p).empty();
}

class Subject final : public CaseSubject {
 public:
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (covered(a, p)) plans.push_back(mixed_kernel().make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    return covered(a, p) ? mixed::kernels_of(p, decode::device_shape(tested_device())) : std::vector<KernelSpec>();
  }
};

class CudaMixed : public CudaCases {
 protected:
  static int check_all(const std::vector<cases::Case>& list) { return CudaCases::check_all(list, Subject()); }
};

TEST_F(CudaMixed, MatchesTheOracle) {
  const std::vector<cases::Case> list = table_and_random_cases(kRandomMixedCasesOnCuda);
  warm_all(list, Subject());
  EXPECT_GT(check_all(list), picks_cases() ? 0 : 100);
}

// Several key tiles, M blocks, work tiles and splits of both kernels.
TEST_F(CudaMixed, LongerThanATile) {
  std::vector<cases::Case> list;
  const auto add = [&](const std::string& kv, const std::string& rest) {
    list.push_back(tests::make_case(cases::Row(R"("dtype": "bf16", "causal": true, "max_logits": true,
            "seqlens_q": [1, 300, 4, 129, 0, 17, 1, 5, 2],
            "seqlens_kv": [9000, 500, 260, 1300, 20, 600, 15000, 5, 0])")
                                        .set("name", cat("long ", list.size()))
                                        .with(rest)
                                        .with(kv)));
  };
  for (const char* kv :
       {R"("kv": "paged", "cache": {"page_size": 16})", R"("kv": "contiguous")",
        R"("kv": "paged", "cache": {"page_size": 64, "layout": "hnd", "dtype": "e4m3", "scales": "head"})",
        R"("kv": "paged", "cache": {"page_size": 32}, "new_tokens": true)",
        R"("kv": "paged", "cache": {"page_size": 16}, "new_tokens": true, "prologue": {"append": true,
            "rope": {"style": "linear", "dim": 64, "max_position": 16384}})"})
    add(kv, R"("heads": [8, 2], "head_dim": [128, 128])");
  for (const char* rest :
       {R"("heads": [8, 1], "head_dim": [64, 64])", R"("heads": [3, 3], "head_dim": [128, 128], "window": [200, 0])",
        R"("heads": [8, 2], "head_dim": [256, 256])", R"("heads": [16, 1], "head_dim": [96, 80])"})
    add(R"("kv": "paged", "cache": {"page_size": 32}, "new_tokens": true)", rest);
  warm_all(list, Subject());
  EXPECT_EQ(check_all(list), static_cast<int>(list.size()));
}

// Lengths are read by the device alone: a graph that was captured with some is right with others, which send sequences
// to the other kernel.
TEST_F(CudaMixed, ReplaysAGraphWithOtherLengths) {
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  cases::Problem problem(
      tests::make_case(R"({"name": "graph", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "causal": true, "seqlens_q": [150, 1, 1, 4, 5, 3], "seqlens_kv": [400, 300, 200, 400, 170, 300], "poison": false,
      "max_logits": true})"),
      memory);
  problem.arena().upload();
  const attune_attention a = problem.device();
  const Problem p = make_problem(a, Data::kRequired);
  const auto plan = mixed_kernel().make_plan(p, kDevice);
  cases::Workspace workspace(memory, plan->workspace_size());
  const Graph graph(stream, [&] {
    plan->schedule(p, workspace.buffer.device(), stream.handle());
    plan->run(p, workspace.buffer.device(), stream.handle());
  });
  for (const std::vector<int32_t>& begins : {std::vector<int32_t>{0, 150, 151, 152, 156, 161, 164},
                                             {0, 1, 151, 152, 152, 160, 164},
                                             {0, 4, 9, 9, 9, 9, 164},
                                             {0, 1, 2, 3, 4, 5, 6},
                                             {0, 150, 151, 152, 156, 161, 164}}) {
    // The table on the host is what the oracle and the upload read.
    std::memcpy(problem.host().cu_seqlens_q.data, begins.data(), begins.size() * sizeof(int32_t));
    const cases::Expected expected = cases::evaluate(problem);
    problem.arena().upload();
    graph.replay(stream);
    stream.synchronize();
    EXPECT_EQ(cases::compare(problem, expected).failure, "") << begins[1] << ", " << begins[2];
  }
}

// Before either kernel, and the prologue, has written anything.
TEST_F(CudaMixed, RefusesWhatIsNotAlignedBeforeItLaunches) {
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  const cases::Row common(R"("name": "aligned", "heads": [8, 2], "head_dim": [64, 64], "kv": "paged", "causal": true,
      "new_tokens": true, "seqlens_q": [40, 1, 1], "seqlens_kv": [90, 60, 40], "prologue": {"append": true})");
  for (const char* dtype : {"bf16", "f32"}) {
    cases::Problem problem(tests::make_case(common.set("dtype", dtype)), memory);
    problem.arena().upload();
    Problem p = make_problem(problem.device(), Data::kRequired);
    const auto plan = mixed_kernel().make_plan(p, kDevice);
    cases::Workspace workspace(memory, plan->workspace_size());
    p.cache.k.data += 4;
    plan->schedule(p, workspace.buffer.device(), stream.handle());
    EXPECT_THROW(plan->run(p, workspace.buffer.device(), stream.handle()), Failure) << dtype;
    stream.synchronize();
    for (const auto& buffer : problem.arena().buffers())
      EXPECT_TRUE(std::equal(buffer->host(), buffer->host() + buffer->size(), buffer->download().begin()))
          << buffer->name();
  }
}

TEST_F(CudaMixed, OneScheduleServesSeveralRuns) {
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  cases::Problem problem(
      tests::make_case(R"({"name": "layers", "heads": [8, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "causal": true, "seqlens_q": [200, 1, 1, 3], "seqlens_kv": [900, 6000, 40, 700]})"),
      memory);
  problem.arena().upload();
  const cases::Expected expected = cases::evaluate(problem);
  const attune_attention a = problem.device();
  const Problem p = make_problem(a, Data::kRequired);
  const auto plan = mixed_kernel().make_plan(p, kDevice);
  cases::Workspace workspace(memory, plan->workspace_size());
  plan->schedule(p, workspace.buffer.device(), stream.handle());
  for (int layer = 0; layer < 5; ++layer) plan->run(p, workspace.buffer.device(), stream.handle());
  stream.synchronize();
  EXPECT_EQ(cases::compare(problem, expected).failure, "");
}

}  // namespace
}  // namespace attune::cuda
