// SPDX-License-Identifier: Apache-2.0
// Kernels made ready before they are planned.
#pragma once

#include <span>

#include "attune/attune.h"

namespace attune {

// Plans each descriptor once, several at a time; the backend keeps the kernels that this loads. Tries all, then throws
// the first failure with the index of its descriptor.
void warm_kernels(std::span<const attune_attention* const> attentions, attune_device device);

}  // namespace attune
