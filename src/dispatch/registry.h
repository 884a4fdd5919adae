// SPDX-License-Identifier: Apache-2.0
// The kernel registry: all kernels, and which of them a problem gets.
#pragma once

#include "core/kernel.h"
#include "cuda/architecture.h"

namespace attune {

int kernel_count();
const Kernel& kernel_at(int i);
// The first row of the device's type that takes the problem and does not leave it to another; with ATTUNE_KERNEL=<name>
// only that row is tried. Throws UNSUPPORTED with the nearest row and what differs. target: what a GPU's
// kernels are compiled for. backward: given where the operation is kAttentionBackward; p is its forward.
const Kernel& choose_kernel(const Problem& p, const Traits& t, int32_t device_type, const char* operation = kAttention,
                            const cuda::Target& target = {}, const BackwardProblem* backward = nullptr);
// The same for a device, which is checked first: throws what check_device throws.
const Kernel& find_kernel(const Problem& p, const Traits& t, attune_device device, const char* operation = kAttention,
                          const BackwardProblem* backward = nullptr);

}  // namespace attune
