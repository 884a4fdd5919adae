// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/async_copy.cuh on the CPU. Shared addresses begin at kSharedBase, so that 0 is none.
#pragma once

namespace attune::ptx {

inline constexpr unsigned kSharedBase = 1024;

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - emulator::shared_memory()) + kSharedBase;
}
inline unsigned char* shared_pointer(unsigned address) { return emulator::shared_memory() + (address - kSharedBase); }

}  // namespace attune::ptx
