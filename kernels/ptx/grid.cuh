// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: PTX ISA, "griddepcontrol", which does nothing in a launch without the attribute.
// Architectures without it start a kernel when the one before has ended.
#pragma once

#include "ptx/architecture.h"

namespace attune::ptx {

// Waits until the previous kernels have finished and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernels() {
  if constexpr (has(kDependentLaunch)) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Orders this thread's writes before its later ones, for all threads of the device. PTX ISA, "fence".
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The dependent kernels may be launched once every block has executed this or exited.
__device__ __forceinline__ void allow_next_kernel() {
  if constexpr (has(kDependentLaunch)) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace attune::ptx
