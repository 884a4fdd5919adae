// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/grid.cuh on the CPU: kernels run one after the other.
#pragma once

namespace attune::ptx {

inline void wait_for_previous_kernels() { emulator::note_wait_for_previous_kernels(); }
inline void fence_device() {}
inline void allow_next_kernel() { emulator::note_next_kernel_is_allowed(); }

}  // namespace attune::ptx
