// SPDX-License-Identifier: Apache-2.0
// Arithmetic, and parts of SharedStorage structs, whose sizeof the host uses. Compiled by NVRTC and by the host's
// compiler; no standard headers.
#pragma once

#include "common/shared_function.h"

namespace attune::kernels {

ATTUNE_SHARED_FUNCTION int align_up(int x, int to) { return (x + to - 1) / to * to; }

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
ATTUNE_SHARED_FUNCTION int divide(long long n, Divisor by) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * by.multiplier >> by.shift);
}

// A field of kCount values; with [[no_unique_address]] it takes no bytes if kCount is 0.
template <class T, int kCount>
struct SharedArray {
  T at[kCount];
};
template <class T>
struct SharedArray<T, 0> {};

// An mbarrier (ptx/barrier.cuh).
using Barrier = unsigned long long;

constexpr int kMostSharedBytes = 232448;  // of a block, on Hopper

}  // namespace attune::kernels
