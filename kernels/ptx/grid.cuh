// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: PTX ISA, "griddepcontrol", which does nothing in a launch without the attribute.
#pragma once

namespace attune::ptx {

// Waits until the kernels that this one depends on have finished and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// What the thread has written is visible to threads of the device that see what it does next. PTX ISA, "fence".
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The kernels that depend on this one may be launched once every block has said so or ended.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace attune::ptx
