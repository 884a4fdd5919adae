// SPDX-License-Identifier: Apache-2.0
// Prefill attention on CUDA: many query rows a sequence over dense keys, a cache, or both (kernels/prefill/).
#pragma once

#include <cstdint>
#include <memory>

#include "core/kernel.h"

namespace attune::cuda {

const Kernel& prefill_kernel();
// Dense e4m3 queries, keys and values, weights rounded to e4m3.
const Kernel& prefill_fp8_kernel();
// fp32 queries, and dense keys and values; a cache may be of any plain format. Also 16-bit ones, as fp32, over caches
// whose rows cuda_prefill does not take.
const Kernel& prefill_fp32_kernel();

namespace prefill {
// The one of these that would take the problem.
const Kernel& kernel_for(const Problem& p);
// Its plan. Sequences of at most few_q queries are left to another kernel.
std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device, int few_q);
}  // namespace prefill

}  // namespace attune::cuda
