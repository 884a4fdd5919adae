// SPDX-License-Identifier: Apache-2.0
// Decode attention on CUDA: a few query rows a sequence over a paged or contiguous cache (kernels/decode/decode.cu).
#pragma once

#include "core/registry.h"

namespace attune::cuda {

const Kernel& decode_kernel();

}  // namespace attune::cuda
