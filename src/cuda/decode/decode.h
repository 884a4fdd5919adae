// SPDX-License-Identifier: Apache-2.0
// Decode attention on CUDA: a few query rows a sequence over a paged or contiguous cache (kernels/decode/).
#pragma once

#include <cstdint>
#include <memory>

#include "core/kernel.h"

namespace attune::cuda {

const Kernel& decode_kernel();

// Its plan. may_cluster false: never by clusters, which few and short sequences get.
std::unique_ptr<KernelPlan> make_decode_plan(const Problem& p, int32_t device, bool may_cluster);
// Of the short sequences, where another kernel serves the longer ones.
namespace decode {
struct Beside;
}
std::unique_ptr<KernelPlan> make_decode_plan_beside(const Problem& p, int32_t device, const decode::Beside& beside);

}  // namespace attune::cuda
