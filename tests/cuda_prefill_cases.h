// SPDX-License-Identifier: Apache-2.0
// Cases by that kernel of prompts on a GPU which is for their elements, where it takes them.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "cuda/attention/prologue.h"
#include "cuda/prefill/config.h"
#include "cuda/prefill/prefill.h"
#include "cuda_cases.h"

namespace attune::cuda {

class ByPrefill final : public CaseSubject {
 public:
  static bool takes(const attune_attention& a, const Problem& p) {
    return prefill::kernel_for(p).coverage.difference(traits_of(p, a)).empty() && prefill::refusal(p).empty();
  }
  std::vector<std::unique_ptr<KernelPlan>> plans(const attune_attention& a, const Problem& p) const override {
    std::vector<std::unique_ptr<KernelPlan>> plans;
    if (takes(a, p)) plans.push_back(prefill::kernel_for(p).make_plan(p, kDevice));
    return plans;
  }
  std::vector<KernelSpec> kernels(const attune_attention& a, const Problem& p) const override {
    if (!takes(a, p)) return {};
    const bool prepares = attention::prepares_rows(p, attention::Rows::kOwnType);
    const prefill::Config c = prefill::choose_config(
        prepares ? attention::after_prologue(p, nullptr, attention::Rows::kOwnType) : p, tested_device().num_sms);
    return {c.main_kernel(), c.schedule_kernel()};
  }
};

// One shape a feature, long enough for several key tiles, M blocks and work tiles, in pages of any size. max_logits:
// with them, without, or both.
inline std::vector<cases::Case> cases_longer_than_a_tile(std::initializer_list<bool> max_logits) {
  std::vector<cases::Case> list;
  int number = 0;
  const cases::Row common(R"("heads": [6, 2], "dtype": "bf16", "seqlens_q": [300, 1, 129, 0, 17],
      "seqlens_kv": [300, 260, 1300, 20, 600])");
  for (const char* kv :
       {R"("kv": "dense")", R"("kv": "paged", "cache": {"page_size": 16})",
        R"("kv": "paged", "cache": {"page_size": 64, "layout": "hnd"})", R"("kv": "paged", "cache": {"page_size": 3})",
        R"("kv": "contiguous")", R"("kv": "paged", "cache": {"page_size": 32}, "new_tokens": true)"}) {
    for (const char* dims : {R"("head_dim": [128, 128])", R"("head_dim": [64, 64])", R"("head_dim": [192, 128])",
                             R"("head_dim": [256, 256])", R"("head_dim": [96, 80])"}) {
      for (const char* mask : {R"("causal": true)", R"("causal": false)", R"("causal": true, "window": [200, 0])"}) {
        for (const bool with : max_logits) {
          const cases::Row row = common.set("name", cat("long ", number++)).set("max_logits", with);
          list.push_back(tests::make_case(row.with(dims).with(mask).with(kv)));
        }
      }
    }
  }
  return list;
}

}  // namespace attune::cuda
