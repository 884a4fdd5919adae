// SPDX-License-Identifier: Apache-2.0
// Prefill attention on CUDA: many query rows a sequence over dense keys, a cache, or both (kernels/prefill/).
#pragma once

#include "core/registry.h"

namespace attune::cuda {

const Kernel& prefill_kernel();

}  // namespace attune::cuda
