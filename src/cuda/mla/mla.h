// SPDX-License-Identifier: Apache-2.0
// MLA attention on CUDA: dense and sparse, from 16-bit and packed caches, decode and prefill (kernels/mla/).
#pragma once

#include "core/kernel.h"

namespace attune::cuda {

const Kernel& mla_kernel();
// The same for GPUs without wgmma (kernels/mla/mma.cu).
const Kernel& mla_mma_kernel();

}  // namespace attune::cuda
