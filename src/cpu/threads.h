// SPDX-License-Identifier: Apache-2.0
// The one pool of threads of the CPU backend: OpenMP's, with a size of our own.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace attune::cpu {

int num_threads();               // what new plans use
void set_num_threads(int count); // 0: the default

// Calls body(i, thread) for i in 0..n-1, dynamically shared; thread is 0..threads-1. body must not throw.
template <class Body>
void parallel_for(int64_t n, int threads, Body&& body) {
  threads = static_cast<int>(std::min<int64_t>(threads, n));
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < n; ++i) body(i, thread);
  }
}

// The same where the thread does not matter.
template <class Body>
void parallel_for(int64_t n, Body&& body) {
  parallel_for(n, num_threads(), [&](int64_t i, int) { body(i); });
}

}  // namespace attune::cpu
