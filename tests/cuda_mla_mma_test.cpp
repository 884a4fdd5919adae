// SPDX-License-Identifier: Apache-2.0
// cuda_mla_mma on a GPU: also on those that have better kernels. ATTUNE_ARCH=sm_80: as on an A100.
#include "cuda/mla/config.h"
#include "cuda/mla/mla.h"
#include "cuda_run.h"

namespace attune::cuda {
namespace {

constexpr int kRandomMlaMmaCasesOnCuda = 300;
constexpr uint64_t kLatentCases = 150;

class ByMlaMma final : public CaseSubject {
 public:
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (takes(a, p)) plans.push_back(mla_mma_kernel().make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    if (!takes(a, p)) return {};
    const DeviceInfo& info = tested_device();
    const mla::Config c = mla::choose_mma_config(p, info.num_sms, info.shared_bytes_per_block);
    return {c.main_kernel(), c.schedule_kernel(), c.combine_kernel()};
  }

 private:
  static bool takes(const attune_attention& a, const Problem& p) {
    return mla_mma_kernel().coverage.difference(traits_of(p, a)).empty() && mla::refusal(p).empty();
  }
};

class CudaMlaMma : public CudaCases {};

TEST_F(CudaMlaMma, MatchesTheOracle) {
  std::vector<cases::Case> list = table_and_random_cases(kRandomMlaMmaCasesOnCuda);
  for (uint64_t seed = 0; seed < kLatentCases; ++seed) list.push_back(cases::random_mla_case(seed));
  warm_all(list, ByMlaMma());
  EXPECT_GT(check_all(list, ByMlaMma()), picks_cases() ? 0 : 100);
}

// Splits of many tiles, and work tiles of several blocks.
TEST_F(CudaMlaMma, LongSequences) {
  std::vector<cases::Case> list;
  for (const char* more :
       {R"("heads": [16, 1], "shared_kv": true, "seqlens_kv": [3000, 17, 900], "cache": {"page_size": 64})",
        R"("heads": [128, 1], "shared_kv": true, "seqlens_kv": [3000, 17, 900], "out_dtype": "f32")",
        R"("heads": [40, 1], "seqlens_q": [3, 1, 2], "seqlens_kv": [2000, 65, 700], "cache": {"format": "mla_656"})"})
    list.push_back(tests::make_case(
        cases::Row(R"("dtype": "bf16", "kv": "paged", "head_dim": [576, 512], "causal": true, "max_logits": true)")
            .with(more)));
  check_all_of(list, ByMlaMma());
}

}  // namespace
}  // namespace attune::cuda
