// SPDX-License-Identifier: Apache-2.0
// setmaxnreg: moves registers between warpgroups (PTX ISA, "setmaxnreg"). All warps of a warpgroup execute it, and the
// kernel needs __launch_bounds__(threads, 1). And a value that the compiler cannot see through.
#pragma once

namespace attune::ptx {

// kCount: 24 to 256, a multiple of 8. Blocks until that many registers are free.
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Returns x. The compiler cannot recompute it from its source, so it stays in a register; and it recomputes what
// derives from it, rather than keep that over a loop.
__device__ __forceinline__ unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace attune::ptx
