// SPDX-License-Identifier: Apache-2.0
// The prefill kernel on a GPU: every case of the table that its coverage takes, and shapes of its own that are longer
// than a tile, against the oracle. Skipped, with the reason, where there is no GPU.
#include <gmock/gmock.h>

#include <array>
#include <cmath>
#include <numbers>
#include <string>
#include <tuple>

#include "cuda/attention/prologue.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/mma.h"
#include "cuda_prefill_cases.h"
#include "failure.h"

namespace attune::cuda {
namespace {

constexpr int kRandomPrefillCasesOnCuda = 300;

class CudaPrefill : public CudaCases {
 protected:
  static int check_all(const std::vector<cases::Case>& list) { return CudaCases::check_all(list, ByPrefill()); }
};

TEST_F(CudaPrefill, MatchesTheOracle) {
  const std::vector<cases::Case> list = table_and_random_cases(kRandomPrefillCasesOnCuda);
  warm_all(list, ByPrefill());
  EXPECT_GT(check_all(list), picks_cases() ? 0 : 100);
}

TEST_F(CudaPrefill, LongerThanATile) {  // without max_logits, maxima may be found late
  check_all_of(cases_longer_than_a_tile({true, false}), ByPrefill());
}

// Codes in x-packed pages, whose V comes in rows of 256 bytes, or of the tokens of a page that a box has.
TEST_F(CudaPrefill, PackedCodesLongerThanATile) {
  std::vector<cases::Case> list;
  int number = 0;
  const cases::Row common(R"("heads": [6, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [300, 1, 129, 0, 17], "seqlens_kv": [300, 260, 500, 20, 600], "max_logits": true)");
  for (const char* cache : {R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "tensor", "page_size": 16})",
                            R"("cache": {"layout": "xpacked", "dtype": "e5m2", "scales": "head", "page_size": 32})",
                            R"("cache": {"layout": "xpacked", "dtype": "i8", "scales": "token", "page_size": 16})",
                            R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "head", "page_size": 240})"}) {
    for (const char* rest :
         {R"("dtype": "bf16")", R"("new_tokens": true)", R"("dtype": "f16", "new_tokens": true)",
          R"("head_dim": [64, 64], "window": [200, 0])", R"("head_dim": [192, 128], "new_tokens": true)",
          R"("head_dim": [96, 80], "softcap": 20)", R"("head_dim": [256, 256], "new_tokens": true)",
          R"("seqlens_q": [1, 2], "seqlens_kv": [9000, 700], "heads": [8, 1])"}) {
      list.push_back(tests::make_case(common.set("name", cat("packed codes ", number++)).with(cache).with(rest)));
    }
  }
  check_all_of(std::move(list), ByPrefill());
}

// Few rows and many keys: splits of work tiles, merged by the block that comes last.
TEST_F(CudaPrefill, SplitsAlongTheKeys) {
  std::vector<cases::Case> list;
  const cases::Row common(R"("name": "split", "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [1, 2, 1], "seqlens_kv": [9000, 700, 25000], "max_logits": true, "cache": {"page_size": 64})");
  for (const char* heads :
       {R"("heads": [8, 1])", R"("heads": [48, 1])", R"("heads": [128, 1])", R"("heads": [32, 8])"}) {
    for (const bool invariant : {false, true})
      list.push_back(tests::make_case(common.set("batch_invariant", invariant).with(heads)));
  }
  EXPECT_EQ(check_all(list), 8);
}

// Queries, keys and values of e4m3: several key tiles, M blocks, work tiles and splits.
TEST_F(CudaPrefill, CodesLongerThanATile) {
  std::vector<cases::Case> list;
  int number = 0;
  const cases::Row common(R"("heads": [6, 2], "dtype": "e4m3", "out_dtype": "bf16", "kv": "dense",
      "seqlens_q": [300, 1, 129, 0, 17], "seqlens_kv": [300, 260, 500, 20, 600])");
  for (const char* dims : {R"("head_dim": [128, 128])", R"("head_dim": [64, 64])", R"("head_dim": [192, 128])",
                           R"("head_dim": [96, 80])", R"("head_dim": [16, 48])", R"("head_dim": [256, 128])"}) {
    for (const char* rest :
         {R"("causal": true)", R"("causal": false, "max_logits": true)", R"("causal": true, "window": [200, 0])",
          R"("causal": true, "softmax_scale": 0.5, "prologue": {"qkv_scale": true})",
          R"("seqlens_q": [1, 2], "seqlens_kv": [9000, 700], "heads": [8, 1])", R"("out_dtype": "f32")"}) {
      list.push_back(tests::make_case(common.set("name", cat("codes ", number++)).with(dims).with(rest)));
    }
  }
  check_all_of(std::move(list), ByPrefill());
}

// Queries, keys and values of fp32: several key tiles, M blocks, work tiles and splits.
TEST_F(CudaPrefill, FloatsLongerThanATile) {
  std::vector<cases::Case> list;
  int number = 0;
  const cases::Row common(R"("heads": [6, 2], "dtype": "f32", "causal": true, "seqlens_q": [300, 1, 129, 0, 17],
      "seqlens_kv": [300, 260, 500, 20, 600])");
  for (const char* dims : {R"("head_dim": [128, 128])", R"("head_dim": [64, 64])", R"("head_dim": [192, 128])",
                           R"("head_dim": [256, 256])", R"("head_dim": [96, 80])", R"("head_dim": [36, 4])"}) {
    for (const char* rest :
         {R"("kv": "dense")", R"("kv": "dense", "causal": false, "max_logits": true)",
          R"("kv": "dense", "window": [200, 0], "sinks": "normal")", R"("kv": "dense", "strides": "odd")",
          R"("kv": "dense", "alibi": 1, "mask_bits": 2)", R"("kv": "dense", "softcap": 20, "plant": "nan_v")",
          R"("kv": "paged", "cache": {"page_size": 16}, "new_tokens": true)",
          R"("kv": "paged", "cache": {"page_size": 3, "layout": "xpacked"})",
          R"("kv": "paged", "cache": {"page_size": 64, "dtype": "i8", "scales": "token"})",
          R"("kv": "dense", "seqlens_q": [1, 2], "seqlens_kv": [9000, 700], "heads": [8, 1])"}) {
      list.push_back(tests::make_case(common.set("name", cat("floats ", number++)).with(dims).with(rest)));
    }
  }
  check_all_of(std::move(list), ByPrefill());
}

// The tensor cores round sums towards zero: those of a tile are few.
TEST_F(CudaPrefill, FloatsKeepTheirAccuracyOverLongContexts) {
  cases::CudaMemory memory(kDevice);
  const cases::Row common(R"("heads": [2, 1], "head_dim": [128, 128], "dtype": "f32", "kv": "dense", "causal": true,
      "seqlens_q": [16384], "seqlens_kv": [16384])");
  for (const char* data : {"normal", "ones_v", "spread"}) {
    const cases::Report report = cases::run_case(tests::make_case(common.set("data", data)), memory, 40);
    EXPECT_EQ(report.failure, "") << data;
    RecordProperty(data, std::to_string(report.worst.ratio));
  }
}

// What the same codes give with P of e4m3 and exact sums. Scores in base 2, taken against `top` less 5.
std::vector<double> exact_sums(const cases::Problem& problem, int64_t row, int64_t head, int64_t kv_head) {
  const attune_attention& a = problem.host();
  const auto at = [&](const attune_tensor& t, int64_t r, int64_t h, int64_t d) {
    return cases::decode(ATTUNE_FLOAT8_E4M3, cases::element_at(t, {r, h, d}));
  };
  const int64_t dim = a.q.shape[2];
  std::vector<double> z(static_cast<size_t>(row + 1)), out(static_cast<size_t>(dim));
  double top = -INFINITY, sum = 0;
  for (int64_t j = 0; j <= row; ++j) {
    double dot = 0;
    for (int64_t d = 0; d < dim; ++d) dot += at(a.q, row, head, d) * at(a.k, j, kv_head, d);
    z[static_cast<size_t>(j)] = dot / std::sqrt(static_cast<double>(dim)) * std::numbers::log2e;
    top = std::max(top, z[static_cast<size_t>(j)]);
  }
  for (int64_t j = 0; j <= row; ++j) {
    const double p = std::exp2(z[static_cast<size_t>(j)] - top + 5);
    const double rounded = cases::round_to(ATTUNE_FLOAT8_E4M3, p, true);
    sum += p;
    for (int64_t d = 0; d < dim; ++d) out[static_cast<size_t>(d)] += rounded * at(a.v, j, kv_head, d);
  }
  for (double& x : out) x /= sum;
  return out;
}

// The sums of the tensor cores keep 14 bits; two levels of them keep what matters.
TEST_F(CudaPrefill, CodesKeepTheirAccuracyOverLongContexts) {
  cases::CudaMemory memory(kDevice);
  cases::Problem problem(tests::make_case(R"({"name": "x", "heads": [2, 1], "head_dim": [128, 128], "dtype": "e4m3",
      "out_dtype": "f32", "kv": "dense", "causal": true, "seqlens_q": [16384], "seqlens_kv": [16384]})"),
                         memory);
  problem.arena().upload();
  const cases::Expected expected = cases::evaluate_sample(problem, 40);
  ASSERT_EQ(cases::run(problem), "");
  const cases::Snapshot snapshot(problem.arena());
  const attune_tensor out = snapshot.after(problem.host().out);
  double squares = 0, exact_squares = 0;
  for (size_t i = 0; i < expected.rows.size(); ++i) {
    const auto [row, head] = expected.rows[i];
    const std::vector<double> exact = exact_sums(problem, row, head, 0);
    for (size_t d = 0; d < exact.size(); ++d) {
      const double want = expected.results[i].out[d];
      const double got = cases::decode(ATTUNE_FLOAT32, cases::element_at(out, {row, head, static_cast<int64_t>(d)}));
      squares += (got - want) * (got - want);
      exact_squares += (exact[d] - want) * (exact[d] - want);
    }
  }
  RecordProperty("error", std::to_string(std::sqrt(squares / exact_squares)));
  EXPECT_LE(std::sqrt(squares), 1.2 * std::sqrt(exact_squares)) << std::sqrt(squares / exact_squares);
}

// What the host decides, without a GPU.
TEST(CudaPrefillConfig, FillsBlocksOfRows) {
  const auto expect = [](const char* shape, int rows, std::initializer_list<std::pair<int, int>> heads_of_groups) {
    const cases::Row common = cases::Row(R"("dtype": "bf16", "kv": "dense")").with(shape);
    for (const auto& [group, heads] : heads_of_groups) {
      cases::Problem problem(tests::make_case(common.set("heads", {group, 1})));
      const prefill::Config c = prefill::choose_config(make_problem(problem.host(), Data::kRequired), 131);
      EXPECT_EQ(c.rows, rows) << group;
      EXPECT_EQ(c.heads_of_tile, heads) << group;
      EXPECT_EQ(group % c.heads_of_tile, 0);
    }
  };
  expect(R"("head_dim": [128, 128], "seqlens_q": [500], "seqlens_kv": [500])", 128,
         {{1, 1}, {4, 4}, {5, 5}, {8, 8}, {12, 12}, {48, 24}, {128, 128}, {7, 7}, {71, 1}, {256, 128}});
  expect(R"("head_dim": [64, 64], "seqlens_q": [500], "seqlens_kv": [500])", 192,
         {{1, 1}, {4, 4}, {5, 5}, {8, 8}, {12, 12}, {48, 48}, {128, 64}, {7, 7}, {71, 1}, {256, 64}});
}

TEST(CudaPrefillConfig, FitsSharedMemory) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "bf16", "kv": "dense", "seqlens_q": [5], "seqlens_kv": [5])");
  for (const char* head_dim :
       {R"("head_dim": [8, 8])", R"("head_dim": [64, 64])", R"("head_dim": [128, 128])", R"("head_dim": [192, 128])",
        R"("head_dim": [128, 256])", R"("head_dim": [256, 64])", R"("head_dim": [256, 256])"}) {
    cases::Problem problem(tests::make_case(common.with(head_dim)));
    const prefill::Config c = prefill::choose_config(make_problem(problem.host(), Data::kRequired), 132);
    EXPECT_GE(c.stages, 2) << head_dim;
    EXPECT_LE(c.shared_bytes(), 232448u) << head_dim;
  }
}

// Codes with other things than the kernel of codes takes: the nearest is named, with what it lacks.
TEST(CudaPrefillConfig, RefusesCodesThatItDoesNotTake) {
  struct Refused {
    const char *rest, *lacks;
  };
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "e4m3", "out_dtype": "bf16",
      "kv": "dense", "seqlens_q": [5], "seqlens_kv": [5])");
  for (const Refused& r : {Refused{R"("softcap": 5)", "score: softcap"},
                           {R"("alibi": 1)", "score: ALiBi"},
                           {R"("mask_bits": 1)", "mask: bits"},
                           {R"("head_dim": [128, 256])", "head_dim_v: 256"},
                           {R"("prologue": {"q_bias": true})", "prologue: bias"}}) {
    cases::Problem problem(tests::make_case(common.with(r.rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_THAT(prefill_fp8_kernel().coverage.difference(traits_of(p, problem.host())), testing::HasSubstr(r.lacks));
  }
  for (const char* dims : {R"("head_dim": [72, 128])", R"("head_dim": [128, 24])"}) {
    cases::Problem problem(tests::make_case(common.with(dims)));
    EXPECT_THAT(prefill::refusal(make_problem(problem.host(), Data::kRequired)), testing::HasSubstr("multiples of 16"));
  }
}

TEST(CudaPrefillConfig, FitsSharedMemoryWithCodes) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "e4m3", "out_dtype": "bf16", "kv": "dense", "seqlens_q": [5],
      "seqlens_kv": [5])");
  for (const char* head_dim : {R"("head_dim": [16, 16])", R"("head_dim": [64, 64])", R"("head_dim": [128, 128])",
                               R"("head_dim": [192, 128])", R"("head_dim": [256, 128])"}) {
    cases::Problem problem(tests::make_case(common.with(head_dim)));
    const prefill::Config c = prefill::choose_config(make_problem(problem.host(), Data::kRequired), 132);
    EXPECT_TRUE(c.stages == 2 || c.stages == 4) << head_dim;
    EXPECT_LE(c.shared_bytes(), 232448u) << head_dim;
  }
}

TEST(CudaPrefillConfig, FitsSharedMemoryWithFloats) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "f32", "kv": "dense", "seqlens_q": [5], "seqlens_kv": [5])");
  for (const auto& [head_dim, rows, keys] : {std::tuple{R"("head_dim": [1, 3])", 128, 64},
                                             {R"("head_dim": [64, 64])", 128, 64},
                                             {R"("head_dim": [128, 128])", 128, 64},
                                             {R"("head_dim": [192, 128])", 64, 64},
                                             {R"("head_dim": [128, 256])", 64, 64},
                                             {R"("head_dim": [256, 64])", 64, 64},
                                             {R"("head_dim": [256, 256])", 64, 32}}) {
    cases::Problem problem(tests::make_case(common.with(head_dim)));
    const prefill::Config c = prefill::choose_config(make_problem(problem.host(), Data::kRequired), 132);
    EXPECT_EQ(c.rows, rows) << head_dim;
    EXPECT_EQ(c.keys, keys) << head_dim;
    EXPECT_GE(c.stages, 1) << head_dim;
    EXPECT_LE(c.shared_bytes(), 232448u) << head_dim;
  }
}

// Rows that lie as they like are loaded channel by channel, and only those.
TEST(CudaPrefillConfig, LoadsFloatsInFoursWhereTheyLieSo) {
  const auto rows_of = [](const std::string& rest, auto change) {
    cases::Problem problem(tests::make_case(
        cases::Row(R"("heads": [4, 2], "dtype": "f32", "seqlens_q": [40], "seqlens_kv": [5], "causal": true)")
            .with(rest)));
    Problem p = make_problem(problem.host(), Data::kRequired);
    change(p);
    EXPECT_EQ(prefill::refusal(p), "");
    const kernels::Fp32Rows r = prefill::fp32_rows(p);
    return std::array{r.q, r.dense_k, r.dense_v, r.cached_k, r.cached_v};
  };
  const auto as_is = [](Problem&) {};
  using Five = std::array<int, 5>;
  EXPECT_EQ(rows_of(R"("kv": "dense", "head_dim": [64, 36])", as_is), (Five{1, 1, 1, 0, 0}));
  EXPECT_EQ(rows_of(R"("kv": "dense", "head_dim": [64, 35])", as_is), (Five{1, 1, 0, 0, 0}));
  EXPECT_EQ(rows_of(R"("kv": "dense", "head_dim": [64, 64])", [](Problem& p) { p.k.data += 4; }),
            (Five{1, 0, 1, 0, 0}));
  EXPECT_EQ(rows_of(R"("kv": "dense", "head_dim": [64, 64])", [](Problem& p) { p.q.row_stride += 2; }),
            (Five{0, 1, 1, 0, 0}));
  EXPECT_EQ(rows_of(R"("kv": "dense", "head_dim": [64, 64])", [](Problem& p) { p.k.head_stride += 2; }),
            (Five{1, 0, 1, 0, 0}));
  EXPECT_EQ(rows_of(R"("kv": "dense", "head_dim": [64, 64])", [](Problem& p) { p.v.dim_stride = 4; }),
            (Five{1, 1, 0, 0, 0}));
  EXPECT_EQ(rows_of(R"("kv": "paged", "head_dim": [64, 64], "cache": {"dtype": "bf16"})", as_is),
            (Five{1, 0, 0, 1, 1}));
  EXPECT_EQ(rows_of(R"("kv": "paged", "head_dim": [64, 64], "cache": {"dtype": "e4m3", "scales": "head"})",
                    [](Problem& p) { p.cache.v.data += 2; }),
            (Five{1, 0, 0, 1, 0}));
  EXPECT_EQ(
      rows_of(R"("kv": "paged", "head_dim": [64, 64], "new_tokens": true, "cache": {"layout": "xpacked", "x": 8})",
              as_is),
      (Five{1, 1, 1, 1, 0}));  // V has the slots of a page innermost
  EXPECT_EQ(rows_of(R"("kv": "paged", "head_dim": [64, 64], "cache": {"layout": "xpacked", "x": 2})", as_is)[3], 0);
}

// fp32 goes to its own row where there are many rows, to decode where there are few over a cache.
TEST(CudaPrefillConfig, GivesFloatsToTheirKernel) {
  const cases::Row common(R"("dtype": "f32", "heads": [8, 2], "head_dim": [64, 64], "out_dtype": "f32",
      "seqlens_kv": [90, 80])");
  for (const auto& [rest, kernel, leaves] :
       {std::tuple{R"("kv": "dense", "seqlens_q": [1, 1])", "cuda_prefill_fp32", false},
        {R"("kv": "paged", "seqlens_q": [40, 1])", "cuda_prefill_fp32", false},
        {R"("kv": "paged", "seqlens_q": [1, 1])", "cuda_prefill_fp32", true},
        {R"("kv": "dense", "dtype": "bf16", "seqlens_q": [1, 1])", "cuda_prefill", true},
        {R"("kv": "dense", "dtype": "e4m3", "seqlens_q": [1, 1])", "cuda_prefill_fp8", false}}) {
    cases::Problem problem(tests::make_case(common.with(rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    const Kernel& row = prefill::kernel_for(p);
    EXPECT_STREQ(row.name, kernel) << rest;
    EXPECT_EQ(row.coverage.difference(traits_of(p, problem.host())), "") << rest;
    EXPECT_EQ(row.leaves != nullptr && row.leaves(p, ptx::features_of(90, true)), leaves) << rest;
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
  const cases::Row common(R"("heads": [4, 2], "dtype": "bf16", "seqlens_q": [5], "seqlens_kv": [5])");
  for (const char* wrong :
       {R"("head_dim": [21, 21], "kv": "paged")", R"("head_dim": [64, 64], "kv": "paged", "cache": {"dtype": "f16"})",
        R"("head_dim": [64, 64], "kv": "dense", "prologue": {"rope": {"style": "linear", "dim": 64}})",
        // A query stands at seqused_kv - n + i.
        R"("head_dim": [64, 64], "kv": "dense", "queries": "fixed", "seqlens_q": [5, 5],
                               "seqlens_kv": [5, 3], "prologue": {"rope": {"style": "linear", "dim": 64}})"}) {
    cases::Problem problem(tests::make_case(common.with(wrong)));
    EXPECT_NE(prefill::refusal(make_problem(problem.host(), Data::kRequired)), "") << wrong;
  }
  const auto refusal_of = [](const char* kv, const std::function<void(Problem&)>& change) {
    cases::Problem problem(tests::make_case(
        cases::Row(R"("heads": [4, 2], "dtype": "bf16", "head_dim": [64, 64], "seqlens_q": [5], "seqlens_kv": [5])")
            .with(kv)));
    Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(prefill::refusal(p), "") << kv;
    change(p);
    return prefill::refusal(p);
  };
  const char* const paged = R"("kv": "paged")";
  // Rows that have 4 bytes in common are gathered (cuda_prefill_rows_test.cpp).
  EXPECT_EQ(refusal_of(paged, [](Problem& p) { p.cache.k.head_stride += 1; }),
            "rows of cache.k that do not lie at multiples of 4 bytes");
  for (const auto& apart :
       {+[](Problem& p) { p.cache.v.slot_stride += 1; }, +[](Problem& p) { p.cache.v.page_stride += 1; },
        +[](Problem& p) { p.cache.v.inner_stride = 2; }})
    EXPECT_EQ(refusal_of(paged, apart), "rows of cache.v that do not lie at multiples of 4 bytes");
  EXPECT_EQ(refusal_of(paged, [](Problem& p) { p.cache.v.dtype = ATTUNE_FLOAT16; }), "K and V of different dtypes");
  EXPECT_EQ(refusal_of(paged, [](Problem& p) { p.cache.v.data += 2; }),
            "data that do not lie at multiples of 4 bytes, as cache.v.data here");
  const char* const xpacked = R"("kv": "paged", "cache": {"layout": "xpacked", "page_size": 16})";
  EXPECT_EQ(refusal_of(xpacked, [](Problem& p) { p.cache.v.page_stride += 1; }),
            "an x-packed cache whose rows of tokens do not lie at multiples of 4 bytes");
  EXPECT_EQ(refusal_of(xpacked, [](Problem& p) { p.cache.k.data += 2; }),
            "data that do not lie at multiples of 4 bytes, as cache.k.data here");
  EXPECT_EQ(refusal_of(xpacked, [](Problem& p) { p.cache.page_size = 5; }),
            "x-packed pages of an odd number of tokens");
  const char* const codes = R"("kv": "paged", "cache": {"dtype": "e4m3", "scales": "head"})";
  EXPECT_EQ(refusal_of(codes, [](Problem& p) { p.cache.v.slot_stride += 4; }),
            "rows of cache.v that do not lie at multiples of 16 bytes");
  EXPECT_EQ(refusal_of(codes, [](Problem& p) { p.cache.k.data += 4; }),
            "data that do not lie at multiples of 16 bytes, as cache.k.data here");
  EXPECT_EQ(refusal_of(paged, [](Problem& p) { p.total_q = (int64_t{1} << 29) - 1; }), "");
  EXPECT_EQ(refusal_of(paged, [](Problem& p) { p.total_q = int64_t{1} << 29; }),
            "2^31 or more rows of queries and heads");
  EXPECT_EQ(refusal_of(codes, [](Problem& p) { p.head_dim_v = 40; }),
            "head dims that are no multiples of 16 with a cache of 8 bits");
}

// A run may bring other addresses, strides and scales than its plan saw: what would fault, or be wrong, is named.
TEST(CudaPrefillConfig, NamesWhatARunMayNotBring) {
  const auto change = [](const char* kv, const std::function<void(Problem&)>& other) -> std::string {
    cases::Problem problem(tests::make_case(
        cases::Row(R"("heads": [4, 2], "dtype": "bf16", "head_dim": [64, 64], "seqlens_q": [5], "seqlens_kv": [70])")
            .with(kv)));
    Problem p = make_problem(problem.host(), Data::kRequired);
    const prefill::Config c = prefill::choose_config(p, 132);
    prefill::check_run(p, c);
    other(p);
    return failure_of([&] { prefill::check_run(p, c); });
  };
  const auto beyond = [](const char* what) {
    return std::string(what) +
           " is 2 bytes beyond a multiple of 16; kernel cuda_prefill needs a multiple of 16, or a plan made for such "
           "data";
  };
  const char* const dense = R"("kv": "dense")";
  const char* const paged = R"("kv": "paged", "new_tokens": true)";
  EXPECT_EQ(change(dense, [](Problem& p) { p.q.data += 2; }), beyond("q.data"));
  EXPECT_EQ(change(dense, [](Problem& p) { p.k.data += 2; }), beyond("k.data"));
  EXPECT_EQ(change(dense, [](Problem& p) { p.v.data += 2; }), beyond("v.data"));
  EXPECT_EQ(change(paged, [](Problem& p) { p.cache.k.data += 2; }), beyond("cache.k.data"));
  EXPECT_EQ(change(paged, [](Problem& p) { p.cache.v.data += 2; }), beyond("cache.v.data"));
  EXPECT_EQ(change(paged, [](Problem& p) { p.cache.k.page_stride += 4; }),
            "attention differs from its plan: kernel cuda_prefill does not take rows of cache.k that do not lie at "
            "multiples of 16 bytes");
  EXPECT_EQ(change(paged, [](Problem& p) { p.cache.v.page_stride += 1; }),
            "attention differs from its plan: kernel cuda_prefill does not take rows of cache.v that do not lie at "
            "multiples of 16 bytes");
  for (const auto& [name, strides] : {std::pair{"q", +[](Problem& p) { p.q.head_stride += 4; }},
                                      {"k", +[](Problem& p) { p.k.row_stride += 4; }},
                                      {"v", +[](Problem& p) { p.v.head_stride += 4; }},
                                      {"v", +[](Problem& p) { p.v.dim_stride = 2; }}}) {
    EXPECT_EQ(change(dense, strides),
              cat("rows of ", name,
                  " do not lie at multiples of 16 bytes, as they did when the plan was made; plan with such rows"));
  }
  EXPECT_EQ(change(dense, [](Problem& p) { p.scale = -1; }),
            "softmax_scale is -1.000000; the plan was made for one that is positive");
  EXPECT_EQ(change(dense, [](Problem& p) { p.scale = 0.5; }), "");
}

TEST(CudaPrefillConfig, LeavesFewRowsOverACache) {
  const cases::Row common(R"("dtype": "bf16", "head_dim": [64, 64], "seqlens_kv": [90, 80])");
  for (const auto& [rest, leaves] :
       {std::pair{R"("kv": "paged", "seqlens_q": [1, 1], "heads": [32, 8])", true},
        {R"("kv": "paged", "queries": "fixed", "seqlens_q": [7, 7], "heads": [32, 8])", true},
        {R"("kv": "paged", "queries": "fixed", "seqlens_q": [8, 8], "heads": [32, 8])", false},
        {R"("kv": "paged", "seqlens_q": [7, 1], "heads": [32, 8])", false},
        {R"("kv": "paged", "seqlens_q": [1, 1], "heads": [32, 1])", false}}) {
    cases::Problem problem(tests::make_case(common.with(rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(prefill_kernel().leaves(p, ptx::features_of(90, true)), leaves) << rest;
  }
}

TEST(CudaPrefillConfig, LeavesShortDensePrompts) {
  const cases::Row common(R"("dtype": "bf16", "head_dim": [64, 64])");
  for (const auto& [rest, leaves] :
       {std::pair{R"("seqlens_q": [127, 1], "heads": [32, 8])", true},
        {R"("seqlens_q": [128, 1], "heads": [32, 8])", false},
        {R"("seqlens_q": [8, 8], "seqlens_kv": [128, 128], "heads": [32, 8])", true},
        {R"("seqlens_q": [8, 8], "seqlens_kv": [128, 129], "heads": [32, 8])", false},
        {R"("seqlens_q": [8, 8], "heads": [128, 8])", true},
        {R"("seqlens_q": [8, 8], "heads": [136, 8])", false},
        {R"("seqlens_q": [8, 8], "heads": [32, 8], "batch_invariant": true)", false},
        {R"("seqlens_q": [8, 8], "heads": [32, 8], "softcap": 30)", false},
        {R"("seqlens_q": [8, 8], "heads": [32, 8], "mask_bits": 1)", false},
        {R"("kv": "paged", "seqlens_q": [40, 8], "seqlens_kv": [40, 8], "heads": [32, 8])", false}}) {
    cases::Problem problem(tests::make_case(common.with(rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(prefill_kernel().leaves(p, ptx::features_of(90, true)), leaves) << rest;
    EXPECT_TRUE(prefill_mma_kernel().leaves(p, ptx::features_of(90, true)) != leaves) << rest;
    EXPECT_FALSE(prefill_mma_kernel().leaves(p, ptx::features_of(80, false))) << rest;
    EXPECT_EQ(prefill_fp32_kernel().leaves(p, ptx::features_of(90, true)), leaves) << rest;
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
  std::vector<std::byte> memory(attention::prologue_bytes(p) + 256);
  auto* const begin = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  const Problem after = attention::after_prologue(p, begin);
  const PrepareProblem op = attention::to_prepare(p, begin);
  EXPECT_FALSE(attention::has_prologue(after));
  EXPECT_NO_THROW(prefill::check_alignment(after));
  EXPECT_EQ(op.q.data, p.q.data);
  EXPECT_EQ(op.q_out.data, after.q.data);
  EXPECT_EQ(op.v_out.data, after.v.data);
  const auto end_of = [](const RowView& v, int64_t heads, int64_t head_dim) {
    return v.at(v.rows - 1, heads - 1) + head_dim * v.element_size;
  };
  EXPECT_LE(end_of(after.q, 4, 64), after.k.data);
  EXPECT_LE(end_of(after.k, 2, 64), after.v.data);
  EXPECT_LE(end_of(after.v, 2, 48), begin + attention::prologue_bytes(p));
}

}  // namespace
}  // namespace attune::cuda
