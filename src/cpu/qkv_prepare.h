// SPDX-License-Identifier: Apache-2.0
// attune_qkv_prepare on the CPU.
#pragma once

#include "core/ops.h"

namespace attune::cpu {

void run_qkv_prepare(const PrepareProblem& op);

}  // namespace attune::cpu
