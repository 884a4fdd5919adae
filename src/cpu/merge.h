// SPDX-License-Identifier: Apache-2.0
// attune_merge on the CPU.
#pragma once

#include "core/ops.h"

namespace attune::cpu {

void run_merge(const MergeProblem& op);

}  // namespace attune::cpu
