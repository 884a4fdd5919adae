// SPDX-License-Identifier: Apache-2.0
// Moving registers between warpgroups, and keeping them. PTX ISA, "setmaxnreg": executed by all warps of a warpgroup;
// the kernel needs __launch_bounds__(threads, 1).
#pragma once

namespace attune::ptx {

// kCount: 24 to 256, a multiple of 8. Waits until others have given up as many.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// x, which the compiler keeps from then on, as it does not know how to compute it again.
__device__ __forceinline__ unsigned kept(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace attune::ptx
