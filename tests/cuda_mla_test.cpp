// SPDX-License-Identifier: Apache-2.0
// The MLA kernels on a GPU: every case of the table that their coverage takes, and shapes of their own that take
// several key tiles, work tiles and splits, against the oracle. Skipped, with the reason, where there is no GPU.

#include "cuda/attention/prologue.h"
#include "cuda/mla/config.h"
#include "cuda/mla/mla.h"
#include "cuda_run.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

constexpr int kRandomMlaCasesOnCuda = 300;
constexpr uint64_t kRandomMlaCases = 150;

bool covered(const attune_attention& a, const Problem& p) {
  return mla_kernel().coverage.difference(traits_of(p, a)).empty() && mla::refusal(p).empty();
}

class Subject final : public CaseSubject {
 public:
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (covered(a, p)) plans.push_back(mla_kernel().make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    if (!covered(a, p)) return {};
    const mla::Config c = mla::choose_config(p, tested_device().num_sms);
    return {c.main_kernel(), c.schedule_kernel(), c.combine_kernel()};
  }
};

cases::Row row_with(std::string_view members) {
  return cases::Row(R"("dtype": "bf16", "max_logits": true)").with(members);
}

cases::Case make(const std::string& name, const cases::Row& row) { return tests::make_case(row.set("name", name)); }

// 1 to 128 query heads, and 1 to 16 tokens of a sequence, in whichever way keys come.
std::vector<cases::Case> every_number_of_heads() {
  const char* const kinds[] = {
      R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512])",
      R"("kv": "paged", "head_dim": [576, 512])",
      R"("kv": "paged", "head_dim": [512, 512])",
      R"("kv": "contiguous", "shared_kv": true, "head_dim": [576, 512])",
      R"("kv": "slots", "shared_kv": true, "head_dim": [512, 512])",
      R"("kv": "slots", "head_dim": [576, 512])",
      R"("kv": "slots", "head_dim": [512, 512])",
  };
  const char* const formats[] = {"plain", "mla_656", "mla_584", "plain", "plain", "mla_656", "mla_584"};
  std::vector<cases::Case> list;
  for (int heads = 1; heads <= 128; ++heads) {
    const int kind = heads % 7, page_size = 16 << (heads / 7 % 7), tokens = 1 + heads * 7 % 16;
    cases::Row row = row_with(kinds[kind]).set("queries", "fixed").set("heads", {heads, 1});
    if (kind != 3) row = row.set("cache.format", formats[kind]).set("cache.page_size", page_size);
    if (kind > 3) {
      row = row.with(R"("batch": 2, "sparse": {"topk_length": "batch", "slots": 200}, "sinks": "mixed")")
                .set("sparse.topk", heads + 7);
    } else {
      row = row.with(R"("seqlens_kv": [190, 3], "causal": true)");
    }
    for (const int seqlen_q : {1, tokens})
      list.push_back(make(cat("mla heads ", heads, "x", seqlen_q), row.set("seqlens_q", seqlen_q)));
  }
  return list;
}

std::vector<cases::Case> edges_of_lists() {
  std::vector<cases::Case> list;
  for (const char* kv :
       {R"("shared_kv": true, "head_dim": [576, 512])", R"("head_dim": [576, 512], "cache": {"format": "mla_656"})",
        R"("head_dim": [512, 512], "cache": {"format": "mla_584", "page_padding": true})"}) {
    for (const int topk : {1, 63, 64, 65, 2047, 16385}) {
      for (const int heads : {16, 20, 128}) {
        if (topk == 16385 && heads == 20) continue;
        const char* const lengths = topk > 2000 ? R"("seqlens_q": [1])" : R"("seqlens_q": [2, 1, 3])";
        const cases::Row row = row_with(R"("kv": "slots", "sparse": {"slots": 3000})").with(lengths).with(kv);
        list.push_back(make(cat("mla list ", list.size()), row.set("heads", {heads, 1}).set("sparse.topk", topk)));
      }
    }
    const cases::Row finished = row_with(R"("kv": "slots", "seqlens_q": [1, 2, 1], "finished": [0, 1, 0],
        "zero_finished": true, "sparse": {"topk": 200}, "extra": {"topk": 9, "page_size": 16})")
                                    .with(kv);
    for (const int64_t heads : {16, 20, 128})
      list.push_back(make(cat("mla finished ", list.size()), finished.set("heads", {heads, 1})));
    // All in the second cache, whose pages are larger.
    const cases::Row second = row_with(R"("kv": "slots", "seqlens_q": [2, 1, 3], "heads": [20, 1],
        "sparse": {"topk": 70, "invalid": 1}, "extra": {"topk": 65, "page_size": 256}, "sinks": "mixed")");
    list.push_back(make(cat("mla second ", list.size()), second.with(kv)));
  }
  // Prompts: by offsets, several of one length, several KV heads with lists of their own.
  for (const char* dims :
       {R"("head_dim": [576, 512], "shared_kv": true)", R"("head_dim": [512, 512], "shared_kv": true)"}) {
    for (
        const char* rest :
        {R"("heads": [20, 1], "seqlens_q": [3, 0, 5], "seqlens_kv": [90, 40, 200], "sparse": {"topk": 75, "topk_length": "token"})",
         R"("heads": [128, 1], "seqlens_q": [3, 2, 5], "seqlens_kv": [90, 40, 200], "sparse": {"topk": 75}, "strides": "transposed")",
         R"("heads": [64, 1], "queries": "fixed", "seqlens_q": 3, "seqlens_kv": [90, 200], "sparse": {"topk": 75, "topk_length": "batch"})",
         R"("heads": [6, 2], "queries": "flat", "cu_seqlens_kv": false, "seqlens_q": [7], "seqlens_kv": [200],
             "sparse": {"topk": 75, "topk_length": "token", "per_head": true})",
         R"("heads": [20, 1], "dtype": "f16", "seqlens_q": [3, 2], "seqlens_kv": [90, 200], "sparse": {"topk": 75, "invalid": 0.5})"})
      list.push_back(make(cat("mla lists of prompts ", list.size()), row_with(dims).with(rest)));
  }
  return list;
}

class CudaMla : public CudaCases {
 protected:
  static void check_all_of(std::vector<cases::Case> list) { CudaCases::check_all_of(std::move(list), Subject()); }
};

TEST_F(CudaMla, MatchesTheOracle) {
  const std::vector<cases::Case> list = table_and_random_cases(kRandomMlaCasesOnCuda);
  warm_all(list, Subject());
  EXPECT_GT(check_all(list, Subject()), picks_cases() ? 0 : 20);
}

TEST_F(CudaMla, Dense) {
  std::vector<cases::Case> list;
  for (const char* kv :
       {R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 64})",
        R"("kv": "paged", "shared_kv": true, "head_dim": [512, 512], "cache": {"page_size": 16})",
        R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 3})",
        R"("kv": "contiguous", "shared_kv": true, "head_dim": [576, 512])",
        R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 256}, "new_tokens": true)",
        R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
        R"("kv": "paged", "head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 64})"}) {
    for (const int64_t heads : {16, 128, 7}) {
      for (const char* lengths :
           {R"("seqlens_q": [1, 1, 1, 1], "seqlens_kv": [2000, 0, 1, 130], "causal": true)",
            R"("seqlens_q": [2, 3, 17, 0], "seqlens_kv": [1500, 70, 64, 9], "causal": true)",
            R"("seqlens_q": [4, 1], "seqlens_kv": [700, 129], "window": [200, 0], "causal": true)"}) {
        list.push_back(make(cat("mla dense ", list.size()), row_with(kv).set("heads", {heads, 1}).with(lengths)));
      }
    }
  }
  // 17 to 32 heads over packed rows have a kernel of their own.
  for (
      const char* rest :
      {R"("heads": [32, 1], "seqlens_kv": [5000, 0, 1, 130, 2047], "sinks": "mixed")",
       R"("heads": [17, 1], "seqlens_kv": [2000, 3000, 64, 65], "causal": true, "window": [1000, 0], "out_dtype": "f32")",
       R"("heads": [32, 1], "seqlens_kv": [5000, 3000], "data": "spread")",
       R"("heads": [30, 1], "seqlens_q": [1, 1, 0, 1], "seqlens_kv": [1999, 0, 7, 700], "causal": true, "new_tokens": true)",
       R"("heads": [32, 1], "seqlens_kv": [900, 800, 70], "queries": "fixed", "batch_invariant": true)"}) {
    const cases::Row packed = row_with(R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656"})");
    list.push_back(make(cat("mla half ", list.size()), packed.with(rest)));
  }
  check_all_of(std::move(list));
}

// As many M blocks as would leave much of the grid idle: the schedule balances them, in chains of work tiles.
TEST_F(CudaMla, BatchesBetweenRounds) {
  std::vector<cases::Case> list;
  for (
      const char* rest :
      {R"("kv": "paged", "shared_kv": true, "cache": {"page_size": 64}, "heads": [72, 1], "batch": 70, "seqlens_kv": 560)",
       R"("kv": "paged", "shared_kv": true, "cache": {"page_size": 64}, "heads": [36, 1], "batch": 140, "seqlens_kv": 400,
            "sinks": "mixed")",
       R"("kv": "paged", "shared_kv": true, "cache": {"page_size": 16}, "heads": [5, 1], "batch": 160,
            "seqlens_kv": {"random": [0, 1500], "seed": 6})",
       R"("kv": "paged", "shared_kv": true, "cache": {"page_size": 3}, "heads": [24, 1], "batch": 150, "queries": "fixed",
            "seqlens_q": 2, "causal": true, "seqlens_kv": {"random": [64, 700], "seed": 7}, "out_dtype": "f32")",
       R"("kv": "paged", "cache": {"format": "mla_656"}, "heads": [72, 1], "batch": 50,
            "seqlens_kv": {"random": [0, 1200], "seed": 8})",
       R"("kv": "paged", "cache": {"format": "mla_656"}, "heads": [9, 1], "batch": 150, "seqlens_kv": 500)",
       R"("kv": "paged", "cache": {"format": "mla_656"}, "heads": [20, 1], "batch": 90,
            "seqlens_kv": {"random": [0, 1500], "seed": 9})",
       R"("kv": "paged", "cache": {"format": "mla_584"}, "head_dim": [512, 512], "heads": [36, 1], "batch": 144,
            "seqlens_kv": 450)",
       R"("kv": "slots", "shared_kv": true, "heads": [72, 1], "seqlens_q": [80], "sparse": {"topk": 450, "invalid": 0.1})"})
    list.push_back(make(cat("mla rounds ", list.size()), row_with(R"("head_dim": [576, 512])").with(rest)));
  check_all_of(std::move(list));
}

TEST_F(CudaMla, Prologues) {
  std::vector<cases::Case> list;
  for (const char* kv :
       {R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 64})",
        R"("kv": "paged", "shared_kv": true, "head_dim": [576, 512], "cache": {"page_size": 3}, "strides": "packed")",
        R"("kv": "contiguous", "shared_kv": true, "head_dim": [512, 512])",
        R"("kv": "paged", "head_dim": [576, 512], "cache": {"format": "mla_656", "page_size": 64})",
        R"("kv": "paged", "head_dim": [512, 512], "cache": {"format": "mla_584", "page_size": 64})"}) {
    for (const char* prologue :
         {R"("prologue": {"append": true})",
          R"("prologue": {"append": true, "rope": {"style": "yarn", "dim": 64, "offset": 448, "interleaved": true}})",
          R"("prologue": {"q_bias": true, "k_bias": true, "ia3_tasks": 2, "logn": 100, "append": true,
             "rope": {"style": "linear", "dim": 64, "positions": 1}})"}) {
      for (
          const char* rest :
          {R"("heads": [128, 1], "seqlens_q": [1, 1, 1, 1], "seqlens_kv": [2000, 0, 1, 130])",
           R"("heads": [16, 1], "seqlens_q": [2, 3, 300, 0], "seqlens_kv": [1500, 70, 64, 9], "finished": [0, 1, 0, 0])"}) {
        const cases::Row row = row_with(kv).with(R"("new_tokens": true, "causal": true)").with(prologue).with(rest);
        list.push_back(make(cat("mla prologue ", list.size()), row));
      }
    }
  }
  check_all_of(std::move(list));
}

TEST_F(CudaMla, Sparse) {
  std::vector<cases::Case> list;
  for (const char* kv : {R"("kv": "slots", "shared_kv": true, "head_dim": [576, 512])",
                         R"("kv": "slots", "head_dim": [576, 512], "cache": {"format": "mla_656"})",
                         R"("kv": "slots", "head_dim": [512, 512], "cache": {"format": "mla_584"})"}) {
    for (const int64_t heads : {16, 128, 64, 24}) {
      for (const char* rest :
           {R"("seqlens_q": [2, 1, 2], "sparse": {"topk": 512, "invalid": 0.1})",
            R"("seqlens_q": [1, 1, 0, 4], "sparse": {"topk": 130, "topk_length": "token", "slots": 300},
                                  "extra": {"topk": 70, "topk_length": "batch", "page_size": 16}, "sinks": "mixed")",
            R"("seqlens_q": [3], "sparse": {"topk": 65, "invalid": 1})"}) {
        list.push_back(make(cat("mla sparse ", list.size()), row_with(kv).set("heads", {heads, 1}).with(rest)));
      }
    }
  }
  // Small batches go to the m16 kernel; these do not.
  for (const char* kv : {R"("kv": "slots", "shared_kv": true, "head_dim": [576, 512])",
                         R"("kv": "slots", "head_dim": [576, 512], "cache": {"format": "mla_656"})"}) {
    for (const char* rest :
         {R"("seqlens_q": [2, 1, 2], "sparse": {"topk": 512, "invalid": 0.1}, "batch_invariant": true)",
          R"("seqlens_q": [24], "sparse": {"topk": 1024, "invalid": 0.1})"}) {
      const cases::Row row = row_with(kv).with(R"("heads": [128, 1], "sinks": "mixed")").with(rest);
      list.push_back(make(cat("mla sparse many ", list.size()), row));
    }
  }
  const cases::Row prompt = row_with(R"("shared_kv": true, "head_dim": [576, 512], "queries": "flat", "kv": "dense",
      "cu_seqlens_kv": false, "seqlens_q": [40], "seqlens_kv": [600], "sinks": "normal",
      "sparse": {"topk": 200, "topk_length": "token"})");
  for (const int64_t heads : {8, 128})
    list.push_back(make(cat("mla prefill ", list.size()), prompt.set("heads", {heads, 1})));
  check_all_of(std::move(list));
}

TEST_F(CudaMla, RandomCases) {
  std::vector<cases::Case> list;
  for (uint64_t seed = 0; seed < kRandomMlaCases; ++seed) list.push_back(cases::random_mla_case(seed));
  check_all_of(std::move(list));
}

TEST_F(CudaMla, EveryNumberOfHeads) { check_all_of(every_number_of_heads()); }

TEST_F(CudaMla, EdgesOfLists) { check_all_of(edges_of_lists()); }

TEST_F(CudaMla, TablesThatMakeNoSense) {
  cases::CudaMemory memory(kDevice);
  const std::vector<tests::SpoiltCase> list = tests::spoilt_mla_cases();
  std::vector<cases::Case> specs;
  for (const tests::SpoiltCase& spoilt : list) specs.push_back(spoilt.spec);
  warm_calls(memory, specs);
  for (const tests::SpoiltCase& spoilt : list) {
    cases::Problem problem(spoilt.spec, memory);
    spoilt.spoil(problem);
    problem.arena().upload();
    const cases::Expected expected = cases::evaluate(problem);
    plan_and_run(memory, problem.device());
    EXPECT_EQ(cases::compare(problem, expected).failure, "") << spoilt.spec.name;
  }
}

// What the host decides, without a GPU.
TEST(CudaMlaConfig, TakesEveryNumberOfHeadsAndEveryList) {
  for (const auto& list : {every_number_of_heads(), edges_of_lists()}) {
    for (const cases::Case& spec : list) {
      cases::Problem problem(spec);
      EXPECT_TRUE(covered(problem.host(), make_problem(problem.host(), Data::kRequired))) << spec.name;
    }
  }
}

}  // namespace
}  // namespace attune::cuda
