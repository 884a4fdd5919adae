// SPDX-License-Identifier: Apache-2.0
// A kernel of kernels/, specialised and compiled for the emulator while the tests run.
#pragma once

#include <string>

#include "cuda/kernel.h"
#include "cuda/tensor_map.h"
#include "emulator/tensor_map.h"

namespace attune::emulator {

// Null, or why kernels cannot be emulated in this build.
const char* why_not();

// The entry of the kernel, a function that takes the kernel's parameters by value; compiled on the first call for a
// spec. The source's __shared__ variables are static ones. Throws with the compiler's words.
void* find_kernel(const cuda::KernelSpec& spec);

// Checked as for a GPU; of four or five axes, swizzled by 128 or 32 bytes or not at all.
ptx::TensorMap tensor_map(const cuda::TensorMapDesc& desc);

}  // namespace attune::emulator
