// SPDX-License-Identifier: Apache-2.0
// cuda_prefill_mma on a GPU: also on those that have better kernels. ATTUNE_ARCH=sm_80: as on an A100.
#include "cuda/prefill/mma.h"

#include "cuda_cases.h"

namespace attune::cuda {
namespace {

constexpr int kRandomCases = 300;

class ByMma final : public CaseSubject {
 public:
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (takes(a, p)) plans.push_back(prefill_mma_kernel().make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    if (!takes(a, p)) return {};
    return {prefill_mma::choose_config(p).kernel()};
  }

 private:
  static bool takes(const attune_attention& a, const Problem& p) {
    return prefill_mma_kernel().coverage.difference(traits_of(p, a)).empty() && prefill_mma::refusal(p).empty();
  }
};

class CudaPrefillMma : public CudaCases {};

TEST_F(CudaPrefillMma, MatchesTheOracle) {
  const std::vector<cases::Case> list = table_and_random_cases(kRandomCases);
  warm_all(list, ByMma());
  EXPECT_GT(check_all(list, ByMma()), picks_cases() ? 0 : 100);
}

// Several tiles and row blocks, in pages of any size.
TEST_F(CudaPrefillMma, LongerThanATile) {
  std::vector<cases::Case> list;
  int number = 0;
  const cases::Row common(R"("heads": [6, 2], "dtype": "bf16", "seqlens_q": [300, 1, 129, 0, 17],
      "seqlens_kv": [300, 260, 500, 20, 600])");
  for (const char* kv :
       {R"("kv": "dense")", R"("kv": "paged", "cache": {"page_size": 16})",
        R"("kv": "paged", "cache": {"page_size": 64, "layout": "hnd"})", R"("kv": "paged", "cache": {"page_size": 3})",
        R"("kv": "contiguous")", R"("kv": "paged", "cache": {"page_size": 32}, "new_tokens": true)"}) {
    for (const char* dims : {R"("head_dim": [128, 128])", R"("head_dim": [64, 64])", R"("head_dim": [192, 128])",
                             R"("head_dim": [256, 256])", R"("head_dim": [96, 80])"}) {
      for (const char* mask : {R"("causal": true)", R"("causal": false)", R"("causal": true, "window": [200, 0])"}) {
        const cases::Row row = common.set("name", cat("long ", number++)).set("max_logits", true);
        list.push_back(tests::make_case(row.with(dims).with(mask).with(kv)));
      }
    }
  }
  check_all_of(std::move(list), ByMma());
}

}  // namespace
}  // namespace attune::cuda
