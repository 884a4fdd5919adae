// SPDX-License-Identifier: Apache-2.0
// Prefill attention on CUDA: many query rows a sequence over dense keys, a cache, or both (kernels/prefill/).
#pragma once

#include <cstdint>
#include <memory>

#include "core/kernel.h"

namespace attune::cuda {

const Kernel& prefill_kernel();
// Dense e4m3 queries, keys and values; P is rounded to e4m3.
const Kernel& prefill_fp8_kernel();
// fp32 queries, dense keys and values; any plain cache format. Also 16-bit ones, converted to fp32, over caches that
// cuda_prefill does not take.
const Kernel& prefill_fp32_kernel();

namespace prefill {
// Whether a call over a cache has so few rows that most of a row block would be empty.
bool has_few_rows(const Problem& p);
// Dense prompts of which all row blocks are short and run at once: cuda_prefill_mma starts and ends them sooner.
bool is_short_prompt(const Problem& p);
// The kernel of the three above that takes the problem.
const Kernel& kernel_for(const Problem& p);
// A plan of that kernel. Sequences with at most max_decode_q queries are left to another kernel.
std::unique_ptr<KernelPlan> make_plan(const Problem& p, int32_t device, int max_decode_q);
}  // namespace prefill

}  // namespace attune::cuda
