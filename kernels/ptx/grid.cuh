// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL): PTX ISA, "griddepcontrol", which does nothing in a launch without the attribute.
// On architectures without it a kernel starts when the one before has ended.
#pragma once

#include "ptx/architecture.h"

namespace attune::ptx {

// Waits until the previous kernels have finished and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernels() {
  if constexpr (has(kDependentLaunch)) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Orders this thread's earlier writes before its later ones, as seen by all threads of the device. PTX ISA, "fence".
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Dependent kernels may launch once every block has executed this or exited.
__device__ __forceinline__ void allow_next_kernel() {
  if constexpr (has(kDependentLaunch)) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace attune::ptx
