// SPDX-License-Identifier: Apache-2.0
// cuda_prefill_mma on a GPU: also on those that have better kernels. ATTUNE_ARCH=sm_80: as on an A100.
#include "cuda/prefill/mma.h"

#include "cuda/attention/prologue.h"
#include "cuda_prefill_cases.h"

namespace attune::cuda {
namespace {

constexpr int kRandomPrefillMmaCasesOnCuda = 300;

// By that of the kernels which is for the queries; fp32: by prefill_fp32_mma.cu, 16-bit queries too.
class ByMma final : public CaseSubject {
 public:
  explicit ByMma(bool fp32 = false) : fp32_(fp32) {}
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (takes(a, p)) plans.push_back(row_for(p).make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    if (!takes(a, p)) return {};
    const DeviceInfo& info = tested_device();
    const attention::Rows rows = fp32_                             ? attention::Rows::kFp32
                                 : p.q.dtype == ATTUNE_FLOAT8_E4M3 ? attention::Rows::kBf16
                                                                   : attention::Rows::kOwnType;
    const Problem attended = rows == attention::Rows::kOwnType ? p : attention::after_prologue(p, nullptr, rows);
    return {prefill_mma::choose_config(attended, info.shared_bytes_per_sm, info.shared_bytes_per_block).kernel()};
  }

 private:
  const Kernel& row_for(const Problem& p) const {
    if (fp32_ || p.q.dtype == ATTUNE_FLOAT32) return prefill_fp32_mma_kernel();
    return p.q.dtype == ATTUNE_FLOAT8_E4M3 ? prefill_fp8_mma_kernel() : prefill_mma_kernel();
  }
  bool takes(const attune_attention& a, const Problem& p) const {
    return row_for(p).coverage.difference(traits_of(p, a)).empty() && row_for(p).refusal(p).empty();
  }
  bool fp32_;
};

class CudaPrefillMma : public CudaCases {};

TEST_F(CudaPrefillMma, MatchesTheOracle) {
  const std::vector<cases::Case> list = table_and_random_cases(kRandomPrefillMmaCasesOnCuda);
  warm_all(list, ByMma());
  EXPECT_GT(check_all(list, ByMma()), picks_cases() ? 0 : 100);
}

TEST_F(CudaPrefillMma, LongerThanATile) { check_all_of(cases_longer_than_a_tile({true}), ByMma()); }

TEST_F(CudaPrefillMma, SixteenBitsAsFloats) { check_all_of(cases_longer_than_a_tile({true}), ByMma(true)); }

}  // namespace
}  // namespace attune::cuda
