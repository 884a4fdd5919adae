// SPDX-License-Identifier: Apache-2.0
// The backward of attention on CUDA (kernels/backward/): dense keys, head dims up to 256.
#pragma once

#include "core/kernel.h"

namespace attune::cuda {

// 16 bits, by wgmma.
const Kernel& backward_kernel();
// fp32, and 16 bits: by mma.sync.
const Kernel& backward_fp32_kernel();
const Kernel& backward_mma_kernel();

}  // namespace attune::cuda
