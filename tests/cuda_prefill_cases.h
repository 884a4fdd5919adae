// SPDX-License-Identifier: Apache-2.0
// Cases by that kernel of prompts on a GPU which is for their elements, where it takes them.
#pragma once

#include <memory>
#include <vector>

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
    const prefill::Config c = prefill::choose_config(p, require_device(kDevice).num_sms);
    return {c.main_kernel(), c.schedule_kernel()};
  }
};

}  // namespace attune::cuda
