// SPDX-License-Identifier: Apache-2.0
// Devices as the C ABI names them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attune/attune.h"

namespace attune {

// Throws INVALID_ARGUMENT for a device that cannot exist, and DEVICE_ERROR with the reason for one that this machine
// lacks.
void check_device(attune_device device);
// Throws INVALID_ARGUMENT as check_device does: checks the type and, on the CPU, the index.
void check_device_argument(attune_device device);
// Throws INVALID_ARGUMENT for a stream of the CPU.
void check_stream(attune_device device, const void* stream);

// "cpu", "cuda:0".
std::string device_name(attune_device device);

// The devices that kernels run on; the CPU first, then usable GPUs in the order of their ordinals.
int32_t device_count();
// Describes device i, 0 <= i < device_count().
void describe_device(int32_t i, attune_device_info* info);
// Lines "name: text" about the CUDA runtime: driver, each GPU and why it cannot be used, bundle, disk cache, compiler.
std::string describe_cuda();

}  // namespace attune
