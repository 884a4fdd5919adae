// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/registers.cuh on the CPU.
#pragma once

namespace attune::ptx {

template <int kCount>
void warpgroup_reg_alloc() {}
template <int kCount>
void warpgroup_reg_dealloc() {}

inline unsigned opaque(unsigned x) { return x; }

}  // namespace attune::ptx
