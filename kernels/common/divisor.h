// SPDX-License-Identifier: Apache-2.0
// Division by a number that only the host knows. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/host_device.h"

namespace attune::kernels {

// n / divisor for 0 <= n < 2^31: n * multiplier >> shift. A division by a number that the compiler does not know is 30
// instructions, one after the other.
struct Divisor {
  unsigned multiplier;
  int shift;
};
ATTUNE_SHARED_FUNCTION Divisor make_divisor(unsigned divisor) {
  int shift = 31;
  while (shift < 62 && (1ull << (shift - 31)) < divisor) ++shift;
  return {static_cast<unsigned>(((1ull << shift) + divisor - 1) / divisor), shift};
}
ATTUNE_SHARED_FUNCTION int divide(int n, const Divisor& by) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * by.multiplier >> by.shift);
}

}  // namespace attune::kernels
