// SPDX-License-Identifier: Apache-2.0
// Arithmetic and building blocks of SharedStorage structs, whose sizeof the host uses. Compiled by NVRTC and by the
// host's compiler; no standard headers.
#pragma once

#include "common/shared_function.h"

namespace attune::kernels {

ATTUNE_SHARED_FUNCTION int align_up(int x, int to) { return (x + to - 1) / to * to; }

// n / divisor for 0 <= n < 2^31, as n * multiplier >> shift (a fast divmod). A division by a number that is unknown at
// compile time takes a chain of 30 instructions.
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

// An array field of kCount values. With [[no_unique_address]] it takes no bytes if kCount is 0.
template <class T, int kCount>
struct SharedArray {
  T at[kCount];
};
template <class T>
struct SharedArray<T, 0> {};

// An mbarrier (ptx/barrier.cuh).
using Barrier = unsigned long long;

constexpr int kMostSharedBytes = 232448;  // the limit of a block on Hopper

}  // namespace attune::kernels
