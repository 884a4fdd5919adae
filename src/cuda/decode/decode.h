// SPDX-License-Identifier: Apache-2.0
// Decode attention on CUDA: a few query rows a sequence over a paged or contiguous cache (kernels/decode/).
#pragma once

#include <cstdint>
#include <memory>

#include "core/kernel.h"

namespace attune::cuda {

const Kernel& decode_kernel();

// A plan of cuda_decode. may_cluster false: without clusters, which few and short sequences get otherwise.
std::unique_ptr<KernelPlan> make_decode_plan(const Problem& p, int32_t device, bool may_cluster);
// The same for the short sequences, where another kernel serves the longer ones.
namespace decode {
struct Beside;
}
std::unique_ptr<KernelPlan> make_decode_plan_beside(const Problem& p, int32_t device, const decode::Beside& beside);

}  // namespace attune::cuda
