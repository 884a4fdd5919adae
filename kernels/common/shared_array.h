// SPDX-License-Identifier: Apache-2.0
// Parts of SharedStorage structs, for kernels and for the host, which uses their sizeof.
#pragma once

namespace attune::kernels {

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
