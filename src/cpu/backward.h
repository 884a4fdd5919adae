// SPDX-License-Identifier: Apache-2.0
// attune_attention_backward on the CPU.
#pragma once

#include "core/kernel.h"

namespace attune::cpu {

const Kernel& backward_kernel();

}  // namespace attune::cpu
