// SPDX-License-Identifier: Apache-2.0
// cuda_prefill_mma on a GPU: also on those that have better kernels. ATTUNE_ARCH=sm_80: as on an A100.
#include "cuda/prefill/mma.h"

#include "cuda_prefill_cases.h"

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
    return {prefill_mma::choose_config(p, require_device(kDevice).shared_bytes_per_sm).kernel()};
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

TEST_F(CudaPrefillMma, LongerThanATile) { check_all_of(cases_longer_than_a_tile({true}), ByMma()); }

}  // namespace
}  // namespace attune::cuda
