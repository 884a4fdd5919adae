// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: slow_write lets its dependent start at once and writes later; add_one waits and reads.
#include "selftest/types.h"

// values [grid * block] = value
extern "C" __global__ void __launch_bounds__(128) slow_write(u32* values, u32 value, u32 nanoseconds) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  for (u32 waited = 0; waited < nanoseconds; waited += 1000) asm volatile("nanosleep.u32 1000;");
  values[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

// out [grid * block] = values + 1
extern "C" __global__ void __launch_bounds__(128) add_one(const u32* values, u32* out) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = values[i] + 1;
  asm volatile("griddepcontrol.launch_dependents;");
}
