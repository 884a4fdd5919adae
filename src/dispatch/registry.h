// SPDX-License-Identifier: Apache-2.0
// The kernel registry: all kernels, and which of them a problem gets.
#pragma once

#include "core/kernel.h"

namespace attune {

int kernel_count();
const Kernel& kernel_at(int i);
// The first row of the device's type that takes the problem and does not leave it to another; ATTUNE_KERNEL=<name>
// leaves only that row. Throws UNSUPPORTED with the nearest row and what differs.
const Kernel& choose_kernel(const Problem& p, const Traits& t, int32_t device_type, const char* operation = kAttention);
// The same for a device that is there; throws as check_device does.
const Kernel& find_kernel(const Problem& p, const Traits& t, attune_device device, const char* operation = kAttention);

}  // namespace attune
