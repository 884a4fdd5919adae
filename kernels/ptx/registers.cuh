// SPDX-License-Identifier: Apache-2.0
// Moving registers between warpgroups (PTX ISA, "setmaxnreg", executed by all warps of a warpgroup; the kernel needs
// __launch_bounds__(threads, 1)), and keeping a value in a register.
#pragma once

namespace attune::ptx {

// kCount: 24 to 256, a multiple of 8. Blocks until the registers are free.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// x, in a form that the compiler cannot recompute, so that it stays in a register.
__device__ __forceinline__ unsigned kept(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace attune::ptx
