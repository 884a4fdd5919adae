// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/reduce.cuh on the CPU.
#pragma once

namespace attune::ptx {

inline unsigned max_of_warp(unsigned x) {
  const uint64_t* all = emulator::exchange(x);
  for (int i = 0; i < 32; ++i) x = max(x, static_cast<unsigned>(all[i]));
  return x;
}
inline unsigned min_of_warp(unsigned x) {
  const uint64_t* all = emulator::exchange(x);
  for (int i = 0; i < 32; ++i) x = min(x, static_cast<unsigned>(all[i]));
  return x;
}
inline int sum_of_warp(int x) {
  const uint64_t* all = emulator::exchange(static_cast<unsigned>(x));
  unsigned sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<unsigned>(all[i]);
  return static_cast<int>(sum);
}

}  // namespace attune::ptx
