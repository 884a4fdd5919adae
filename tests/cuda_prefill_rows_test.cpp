// SPDX-License-Identifier: Apache-2.0
// Prompts whose rows the TMA does not take as they lie: dense ones are copied first, caches are gathered, and where
// they cannot be 16-bit queries go to the kernel of fp32. On a GPU, and what the host decides without one.
#include <string>
#include <utility>

#include "cuda/attention/prologue.h"
#include "cuda/ops/config.h"
#include "cuda/prefill/config.h"
#include "cuda_prefill_cases.h"

namespace attune::cuda {
namespace {

class CudaPrefillRows : public CudaCases {};

// Rows that the TMA does not take as they lie, by their strides or their head dims.
TEST_F(CudaPrefillRows, OfAnySizeLongerThanATile) {
  std::vector<cases::Case> list;
  int number = 0;
  const cases::Row common(R"("heads": [6, 2], "dtype": "bf16", "kv": "dense", "causal": true,
      "seqlens_q": [300, 1, 129, 0, 17], "seqlens_kv": [300, 260, 500, 20, 600])");
  for (const char* rest :
       {R"("head_dim": [100, 100])", R"("head_dim": [36, 20], "window": [200, 0])", R"("head_dim": [3, 250])",
        R"("head_dim": [1, 1])", R"("head_dim": [128, 128], "strides": "odd")",
        R"("head_dim": [64, 64], "strides": "odd", "queries": "fixed", "seqlens_q": 130)",
        R"("head_dim": [100, 100], "heads": [8, 1], "seqlens_q": [1, 2], "seqlens_kv": [9000, 700])",
        R"("head_dim": [100, 100], "kv": "paged", "new_tokens": true, "cache": {"page_size": 16, "row_padding": 4})",
        R"("head_dim": [100, 36], "kv": "paged", "new_tokens": true, "cache": {"page_size": 16, "row_padding": 4},
           "prologue": {"append": true, "rope": {"style": "linear", "dim": 64, "max_position": 1024}})",
        R"("head_dim": [128, 128], "strides": "odd", "dtype": "e4m3", "out_dtype": "bf16",
           "prologue": {"qkv_scale": true})"}) {
    list.push_back(tests::make_case(common.set("name", cat("any size ", number++)).with(rest)));
  }
  check_all_of(std::move(list), ByPrefill());
}

// Over caches whose rows threads cannot copy, either, 16-bit queries go to the kernel of fp32.
class AsFloats final : public CaseSubject {
 public:
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (takes(a, p)) plans.push_back(prefill_fp32_kernel().make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    if (!takes(a, p)) return {};
    const prefill::Config c =
        prefill::choose_config(attention::after_prologue(p, nullptr, attention::Rows::kFp32), tested_device().num_sms);
    return {c.main_kernel(), c.schedule_kernel()};
  }

 private:
  static bool takes(const attune_attention& a, const Problem& p) {
    return &choose_kernel(p, traits_of(p, a), ATTUNE_DEVICE_CUDA) == &prefill_fp32_kernel();
  }
};

std::vector<cases::Case> cases_as_floats() {
  std::vector<cases::Case> list;
  const cases::Row common(R"("heads": [6, 2], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [300, 1, 129, 0, 17], "seqlens_kv": [300, 260, 500, 20, 600], "cache": {"page_size": 16})");
  for (const char* rest :
       {R"("head_dim": [99, 99], "new_tokens": true)",
        R"("head_dim": [37, 21], "dtype": "f16", "cache": {"page_size": 5, "layout": "hnd"}, "lse": false)",
        R"("head_dim": [64, 64], "cache": {"page_size": 21, "layout": "xpacked"})",
        R"("head_dim": [24, 24], "dtype": "f16", "new_tokens": true,
           "cache": {"page_size": 32, "dtype": "e4m3", "scales": "tensor", "layout": "xpacked", "x": 8})",
        R"("head_dim": [40, 40], "new_tokens": true, "cache": {"page_size": 32, "dtype": "i8", "scales": "token"},
           "prologue": {"append": true, "v_bias": true, "rope": {"style": "linear", "dim": 32, "max_position": 1024}})",
        R"("head_dim": [64, 64], "new_tokens": true, "strides": "odd", "sinks": "mixed", "window": [90, 0],
           "cache": {"page_size": 24, "layout": "xpacked"}, "max_logits": true)",
        R"("head_dim": [128, 128], "cache": {"page_size": 24, "dtype": "f16"}, "alibi": 1, "out_dtype": "e4m3",
           "out_scale": true)",
        R"("head_dim": [99, 99], "new_tokens": true, "shared_kv": true,
           "prologue": {"append": true, "k_bias": true, "logn": 8})",
        R"("head_dim": [99, 99], "heads": [128, 1], "seqlens_q": [1, 2], "seqlens_kv": [3000, 700])",
        R"("head_dim": [99, 99], "seqlens_q": [1, 1], "seqlens_kv": [300, 70])"}) {
    list.push_back(tests::make_case(common.set("name", cat("as floats ", list.size())).with(rest)));
  }
  return list;
}

std::vector<cases::Case> gathered_cases() {
  std::vector<cases::Case> list;
  const cases::Row common(R"("heads": [6, 2], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [300, 1, 129, 0, 17], "seqlens_kv": [300, 260, 500, 20, 600], "cache": {"page_size": 16})");
  for (const char* rest :
       {R"("head_dim": [100, 100], "new_tokens": true)",
        R"("head_dim": [36, 20], "dtype": "f16", "cache": {"page_size": 5, "layout": "hnd"}, "lse": false)",
        R"("head_dim": [98, 34], "cache": {"page_size": 16, "row_padding": 2}, "window": [60, 0])",
        R"("head_dim": [180, 100], "new_tokens": true, "sinks": "mixed", "softcap": 30)",
        R"("head_dim": [252, 252], "cache": {"page_size": 24, "separate_v_table": true}, "max_logits": true)",
        R"("head_dim": [100, 100], "new_tokens": true, "shared_kv": true,
           "prologue": {"append": true, "k_bias": true, "logn": 8})",
        R"("head_dim": [68, 68], "kv": "contiguous", "mask_bits": 2)",
        R"("head_dim": [100, 100], "plant": "nan_v", "alibi": 1)",
        R"("head_dim": [100, 100], "heads": [128, 1], "seqlens_q": [1, 2], "seqlens_kv": [3000, 700])",
        R"("head_dim": [128, 128], "cache": {"page_size": 24, "layout": "xpacked"}, "softcap": 30)",
        R"("head_dim": [128, 128], "cache": {"page_size": 8, "layout": "xpacked"}, "new_tokens": true)",
        R"("head_dim": [64, 40], "dtype": "f16", "cache": {"page_size": 20, "layout": "xpacked"}, "new_tokens": true,
           "max_logits": true)",
        R"("head_dim": [40, 96], "cache": {"page_size": 6, "layout": "xpacked"}, "window": [90, 0])",
        R"("head_dim": [128, 256], "cache": {"page_size": 136, "layout": "xpacked", "separate_v_table": true},
           "new_tokens": true, "plant": "nan_v")"}) {
    list.push_back(tests::make_case(common.set("name", cat("gathered ", list.size())).with(rest)));
  }
  return list;
}

TEST_F(CudaPrefillRows, GatheredFromTheCache) { check_all_of(gathered_cases(), ByPrefill()); }

TEST_F(CudaPrefillRows, SixteenBitsAsFloats) { check_all_of(cases_as_floats(), AsFloats()); }

// Threads copy as many bytes at a time as addresses and strides have in common, and a plan is for no fewer.
TEST(CudaPrefillRowsConfig, GathersWhatTheTmaDoesNotTake) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [40], "seqlens_kv": [60])");
  for (const auto& [rest, bytes] : {std::pair{R"("cache": {"page_size": 16, "layout": "xpacked"})", 0},
                                    {R"("cache": {"page_size": 24, "layout": "xpacked"})", 16},
                                    {R"("cache": {"page_size": 20, "layout": "xpacked"})", 8},
                                    {R"("cache": {"page_size": 6, "layout": "xpacked"})", 4},
                                    {R"("cache": {"page_size": 16})", 0},
                                    {R"("cache": {"page_size": 16, "row_padding": 4})", 8},
                                    {R"("cache": {"page_size": 16, "row_padding": 2})", 4}}) {
    cases::Problem problem(tests::make_case(common.with(rest)));
    Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(prefill::refusal(p), "") << rest;
    const prefill::Config c = prefill::choose_config(p, 132);
    EXPECT_EQ(c.gather, bytes) << rest;
    EXPECT_NO_THROW(prefill::check_run(p, c)) << rest;
    p.cache.v.data += 2;
    EXPECT_THROW(prefill::check_run(p, c), Failure) << rest;
    EXPECT_EQ(prefill::refusal(p).empty(), false) << rest;
    if (bytes == 4) continue;
    p.cache.v.data += 2;  // others are taken, but not by this plan
    EXPECT_EQ(prefill::refusal(p), "") << rest;
    EXPECT_EQ(prefill::choose_config(p, 132).gather, 4) << rest;
    EXPECT_THROW(prefill::check_run(p, c), Failure) << rest;
  }
}

// Where there are fewer rows than a block has decode takes them, if it takes the cache.
TEST(CudaPrefillRowsConfig, GivesSixteenBitsToTheKernelOfFloats) {
  const auto chosen = [](const cases::Case& spec) {
    cases::Problem problem(spec);
    const Problem p = make_problem(problem.host(), Data::kRequired);
    return std::string(choose_kernel(p, traits_of(p, problem.host()), ATTUNE_DEVICE_CUDA).name);
  };
  for (const cases::Case& spec : cases_as_floats()) EXPECT_EQ(chosen(spec), "cuda_prefill_fp32") << spec.name;
  for (const cases::Case& spec : gathered_cases()) EXPECT_NE(chosen(spec), "cuda_prefill_fp32") << spec.name;
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_kv": [90, 80], "cache": {"layout": "xpacked", "page_size": 21})");
  for (const auto& [rest, kernel] :
       {std::pair{R"("seqlens_q": [40, 1])", "cuda_decode"},
        {R"("seqlens_q": [70, 1])", "cuda_prefill_fp32"},
        {R"("seqlens_q": [1, 1], "heads": [128, 2])", "cuda_decode"},
        {R"("seqlens_q": [70, 1], "cache": {"layout": "xpacked", "page_size": 24})", "cuda_prefill"},
        {R"("seqlens_q": [10, 1], "cache": {"layout": "xpacked", "page_size": 24})", "cuda_decode"},
        {R"("seqlens_q": [70, 1], "cache": {"page_size": 32})", "cuda_prefill"}}) {
    EXPECT_EQ(chosen(tests::make_case(common.with(rest))), kernel) << rest;
  }
}

// A plan that copies rows does so at every run, wherever they lie then: k and v by themselves where they are not rows
// of q's tokens.
TEST(CudaPrefillRowsConfig, CopiesRowsThatTheTmaDoesNotTake) {
  struct Copied {
    const char* rest;
    bool copies;
    int launches;
    bool vectors;  // by bytes
  };
  const cases::Row common(R"("heads": [4, 2], "dtype": "bf16", "kv": "dense", "causal": true, "seqlens_q": [5, 7])");
  for (const Copied& x :
       {Copied{R"("head_dim": [64, 64], "seqlens_kv": [5, 9])", false, 2, true},
        {R"("head_dim": [36, 64], "seqlens_kv": [5, 9])", true, 2, true},
        {R"("head_dim": [64, 36], "seqlens_kv": [5, 7], "cu_seqlens_kv": false)", true, 1, true},
        {R"("head_dim": [64, 64], "seqlens_kv": [50, 9], "strides": "odd")", true, 2, false},
        {R"("head_dim": [64, 64], "seqlens_kv": [50, 9], "strides": "odd", "dtype": "e4m3", "out_dtype": "bf16")", true,
         2, false},
        {R"("head_dim": [100, 100], "kv": "paged", "new_tokens": true, "seqlens_kv": [5, 9],
            "cache": {"row_padding": 4})",
         true, 1, true}}) {
    cases::Problem problem(tests::make_case(common.with(x.rest)));
    const Problem p = make_problem(problem.host(), Data::kRequired);
    EXPECT_EQ(prefill::refusal(p), "") << x.rest;
    EXPECT_EQ(attention::copies_rows(p), x.copies) << x.rest;
    std::vector<std::byte> memory(1 << 20);
    auto* const begin = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
    const attention::Launches before = attention::launches_before(p, begin);
    ASSERT_EQ(before.count, x.launches) << x.rest;
    const Problem after = attention::after_prologue(p, begin);
    EXPECT_NO_THROW(prefill::check_alignment(after));
    EXPECT_FALSE(attention::copies_rows(after)) << x.rest;
    int64_t rows_of_q = 0, rows_of_k = 0;
    for (const PrepareProblem& op : before) {
      rows_of_q += op.q_out ? op.total : 0, rows_of_k += op.k_out ? op.total : 0;
      EXPECT_EQ(op.batch * op.fixed, op.total);
      EXPECT_EQ(op.copies, x.vectors) << x.rest;
      EXPECT_EQ(ops::choose_store(op).width, x.vectors ? 8 : 1) << x.rest;
    }
    EXPECT_EQ(rows_of_q, p.q.rows) << x.rest;
    EXPECT_EQ(rows_of_k, p.k.rows) << x.rest;
  }
}

// Whole vectors only, and one launch only where k lies as q does.
TEST(CudaPrefillRowsConfig, CopiesNoBytesBeyondRows) {
  cases::Problem problem(tests::make_case(R"({"name": "x", "heads": [4, 2], "head_dim": [36, 36], "dtype": "bf16",
      "kv": "dense", "causal": true, "seqlens_q": [5, 7], "seqlens_kv": [5, 7], "cu_seqlens_kv": false})"));
  const Problem p = make_problem(problem.host(), Data::kRequired);
  const auto before = [&](const std::function<void(Problem&)>& change) {
    Problem other = p;
    change(other);
    return attention::launches_before(other, nullptr);
  };
  const attention::Launches as_it_is = before([](Problem&) {});
  EXPECT_EQ(as_it_is.count, 1);
  EXPECT_TRUE(as_it_is.ops[0].copies);
  EXPECT_FALSE(before([](Problem& x) { x.head_dim_qk = 34; }).ops[0].copies);
  EXPECT_FALSE(before([](Problem& x) { x.head_dim_v = 35; }).ops[0].copies);
  EXPECT_FALSE(before([](Problem& x) { x.v.row_stride += 2; }).ops[0].copies);
  EXPECT_EQ(before([](Problem& x) { x.k.rows_per_batch = 6; }).count, 2);
}

}  // namespace
}  // namespace attune::cuda
