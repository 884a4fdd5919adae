// SPDX-License-Identifier: Apache-2.0
// The prefill kernel on a GPU: every case of the table that its coverage takes, and shapes of its own that are longer
// than a tile, against the oracle. Skipped, with the reason, where there is no GPU.
#include "cuda/prefill/config.h"
#include "cuda/prefill/prefill.h"
#include "cuda/prefill/prologue.h"
#include "cuda_cases.h"

namespace attune::cuda {
namespace {

constexpr int kRandomCases = 300;

bool covered(const attune_attention& a, const Problem& p) {
  return prefill_kernel().coverage.difference(traits_of(p, a)).empty() && prefill::refusal(p).empty();
}

class Subject final : public CaseSubject {
 public:
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (covered(a, p)) plans.push_back(prefill_kernel().make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    if (!covered(a, p)) return {};
    const prefill::Config c = prefill::choose_config(p, require_device(kDevice).num_sms);
    return {c.main_kernel(), c.schedule_kernel()};
  }
};

class CudaPrefill : public CudaCases {
 protected:
  static int check_all(const std::vector<cases::Case>& list) { return CudaCases::check_all(list, Subject()); }
};

TEST_F(CudaPrefill, MatchesTheOracle) {
  const std::vector<cases::Case> list = table_and_random_cases(kRandomCases);
  warm_all(list, Subject());
  EXPECT_GT(check_all(list), picks_cases() ? 0 : 100);
}

// One shape a feature, long enough for several tiles, blocks of rows and tasks.
TEST_F(CudaPrefill, LongerThanATile) {
  std::vector<cases::Case> list;
  int number = 0;
  for (const char* kv :
       {R"("kv": "dense")", R"("kv": "paged", "cache": {"page_size": 16})",
        R"("kv": "paged", "cache": {"page_size": 64, "layout": "hnd"})", R"("kv": "paged", "cache": {"page_size": 3})",
        R"("kv": "contiguous")", R"("kv": "paged", "cache": {"page_size": 32}, "new_tokens": true)"}) {
    for (const char* dims : {"[128, 128]", "[64, 64]", "[192, 128]", "[256, 256]", "[96, 80]"}) {
      for (const char* mask : {R"("causal": true)", R"("causal": false)", R"("causal": true, "window": [200, 0])"}) {
        list.push_back(tests::make_case(std::string(R"({"name": "long )") + std::to_string(number++) +
                                        R"(", "heads": [6, 2], "dtype": "bf16", "seqlens_q": [300, 1, 129, 0, 17],
          "seqlens_kv": [300, 260, 500, 20, 600], "max_logits": true, "head_dim": )" +
                                        dims + ", " + mask + ", " + kv + "}"));
      }
    }
  }
  warm_all(list, Subject());
  EXPECT_EQ(check_all(list), static_cast<int>(list.size()));
}

// Few rows and many keys: parts of blocks of rows, merged by the block that comes last.
TEST_F(CudaPrefill, SplitsAlongTheKeys) {
  std::vector<cases::Case> list;
  for (const char* heads : {"[8, 1]", "[48, 1]", "[128, 1]", "[32, 8]"}) {
    for (const char* invariant : {"false", "true"}) {
      list.push_back(tests::make_case(
          std::string(R"({"name": "split", "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "causal": true,
        "seqlens_q": [1, 2, 1], "seqlens_kv": [9000, 700, 15000], "max_logits": true, "cache": {"page_size": 64},
        "batch_invariant": )") +
          invariant + R"(, "heads": )" + heads + "}"));
    }
  }
  EXPECT_EQ(check_all(list), 8);
}

// What the host decides, without a GPU.
TEST(CudaPrefillConfig, FillsBlocksOfRows) {
  for (const auto& [group, heads] :
       {std::pair{1, 1}, {4, 4}, {5, 5}, {8, 8}, {12, 12}, {48, 24}, {128, 128}, {7, 7}, {71, 1}, {256, 128}}) {
    cases::Problem problem(tests::make_case(
        std::string(R"({"name": "x", "head_dim": [64, 64], "dtype": "bf16", "kv": "dense", "seqlens_q": [5],
            "seqlens_kv": [5], "heads": [)") +
        std::to_string(group) + ", 1]}"));
    const prefill::Config c = prefill::choose_config(make_problem(problem.host(), Data::kRequired), 132);
    EXPECT_EQ(c.heads_of_tile, heads) << group;
    EXPECT_EQ(group % c.heads_of_tile, 0);
  }
}

TEST(CudaPrefillConfig, FitsSharedMemory) {
  for (const char* head_dim :
       {"[8, 8]", "[64, 64]", "[128, 128]", "[192, 128]", "[128, 256]", "[256, 64]", "[256, 256]"}) {
    cases::Problem problem(
        tests::make_case(std::string(R"({"name": "x", "heads": [4, 2], "dtype": "bf16", "kv": "dense", "seqlens_q": [5],
        "seqlens_kv": [5], "head_dim": )") +
                         head_dim + "}"));
    const prefill::Config c = prefill::choose_config(make_problem(problem.host(), Data::kRequired), 132);
    EXPECT_GE(c.stages, 2) << head_dim;
    EXPECT_LE(c.shared_bytes(), 232448u) << head_dim;
  }
}

TEST(CudaPrefillConfig, ChecksAlignmentAtRun) {
  cases::Problem problem(tests::make_case(
      R"({"name": "x", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "dense", "seqlens_q": [5],
          "seqlens_kv": [5]})"));
  Problem p = make_problem(problem.host(), Data::kRequired);
  EXPECT_NO_THROW(prefill::check_alignment(p));
  p.k.data += 2;
  EXPECT_THROW(prefill::check_alignment(p), Failure);
}

TEST(CudaPrefillConfig, RefusesWhatItCannotDo) {
  for (const char* wrong :
       {R"("head_dim": [20, 20], "kv": "dense")", R"("head_dim": [64, 64], "kv": "paged", "cache": {"dtype": "f16"})",
        // A query stands at seqused_kv - n + i.
        R"("head_dim": [64, 64], "kv": "dense", "queries": "fixed", "seqlens_q": [5, 5],
                               "seqlens_kv": [5, 3], "prologue": {"rope": {"style": "linear", "dim": 64}})"}) {
    cases::Problem problem(tests::make_case(
        std::string(R"({"name": "x", "heads": [4, 2], "dtype": "bf16", "seqlens_q": [5], "seqlens_kv": [5], )") +
        wrong + "}"));
    EXPECT_NE(prefill::refusal(make_problem(problem.host(), Data::kRequired)), "") << wrong;
  }
}

TEST(CudaPrefillConfig, LeavesFewRowsOverACache) {
  for (const auto& [rest, leaves] :
       {std::pair{R"("kv": "paged", "seqlens_q": [1, 1], "heads": [32, 8])", true},
        {R"("kv": "paged", "queries": "fixed", "seqlens_q": [7, 7], "heads": [32, 8])", true},
        {R"("kv": "paged", "queries": "fixed", "seqlens_q": [8, 8], "heads": [32, 8])", false},
        {R"("kv": "paged", "seqlens_q": [7, 1], "heads": [32, 8])", false},
        {R"("kv": "paged", "seqlens_q": [1, 1], "heads": [32, 1])", false},
        {R"("kv": "dense", "seqlens_q": [1, 1], "heads": [32, 8])", false}}) {
    cases::Problem problem(tests::make_case(
        std::string(R"({"name": "x", "dtype": "bf16", "head_dim": [64, 64], "seqlens_kv": [90, 80], )") + rest + "}"));
    EXPECT_EQ(prefill_kernel().leaves(make_problem(problem.host(), Data::kRequired)), leaves) << rest;
  }
}

// What a prologue leaves in the workspace is what attention reads.
TEST(CudaPrefillConfig, PlacesWhatThePrologueWrites) {
  cases::Problem problem(tests::make_case(
      R"({"name": "x", "heads": [4, 2], "head_dim": [64, 48], "dtype": "bf16", "kv": "paged", "new_tokens": true,
          "causal": true, "seqlens_q": [5, 9], "seqlens_kv": [30, 0],
          "prologue": {"append": true, "rope": {"style": "linear", "dim": 64}}})"));
  const Problem p = make_problem(problem.host(), Data::kRequired);
  ASSERT_EQ(prefill::refusal(p), "");
  std::vector<std::byte> memory(prefill::prologue_bytes(p) + 256);
  auto* const begin = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  const Problem after = prefill::after_prologue(p, begin);
  const PrepareProblem op = prefill::to_prepare(p, begin);
  EXPECT_FALSE(prefill::has_prologue(after));
  EXPECT_NO_THROW(prefill::check_alignment(after));
  EXPECT_EQ(op.q.data, p.q.data);
  EXPECT_EQ(op.q_out.data, after.q.data);
  EXPECT_EQ(op.v_out.data, after.v.data);
  const auto end_of = [](const RowView& v, int64_t heads, int64_t head_dim) {
    return v.at(v.rows - 1, heads - 1) + head_dim * v.element_size;
  };
  EXPECT_LE(end_of(after.q, 4, 64), after.k.data);
  EXPECT_LE(end_of(after.k, 2, 64), after.v.data);
  EXPECT_LE(end_of(after.v, 2, 48), begin + prefill::prologue_bytes(p));
}

}  // namespace
}  // namespace attune::cuda
