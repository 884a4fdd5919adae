// SPDX-License-Identifier: Apache-2.0
// What the structs of shared memory are made of, for kernels and for the host, which asks for their size.
#pragma once

namespace attune::kernels {

// A field of kCount values, which takes no bytes where there are none ([[no_unique_address]] at its place).
template <class T, int kCount>
struct SharedArray {
  T at[kCount];
};
template <class T>
struct SharedArray<T, 0> {};

// 8 bytes that threads and copies arrive at (ptx/barrier.cuh).
using Barrier = unsigned long long;

constexpr int kMostSharedBytes = 232448;  // of a block, on Hopper

}  // namespace attune::kernels
