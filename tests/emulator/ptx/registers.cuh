// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/registers.cuh on the CPU.
#pragma once

namespace attune::ptx {

template <int kCount>
void take_registers() {}
template <int kCount>
void give_up_registers() {}

inline unsigned kept(unsigned x) { return x; }

}  // namespace attune::ptx
