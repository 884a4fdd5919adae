// SPDX-License-Identifier: Apache-2.0
// The backward of attention on CUDA (kernels/backward/): dense keys of 16 bits, head dims up to 256.
#pragma once

#include "core/kernel.h"

namespace attune::cuda {

const Kernel& backward_kernel();

}  // namespace attune::cuda
