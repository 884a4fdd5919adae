// SPDX-License-Identifier: Apache-2.0
// Cache operations on the CPU: append, quantise, dequantise, gather.
#pragma once

#include "core/ops.h"

namespace attune::cpu {

void run_cache_op(const CacheProblem& op);

}  // namespace attune::cpu
