// SPDX-License-Identifier: Apache-2.0
// The one pool of threads of the CPU backend. The caller always works too, and waits only for threads that have begun:
// a thread that gets no core in time costs its share of the speed, not a time slice, as it would at OpenMP's barrier.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace attune::cpu {

inline constexpr int kMostThreads = 4096;
int num_threads();                // what new plans use
void set_num_threads(int count);  // 0: the default
// Starts the threads that run_together(count, ..) needs, so that a run starts none. A forked child starts its own in
// its first run.
void ready_threads(int count);

// Calls work(context, 0) on this thread, and work(context, 1), work(context, 2) .. on up to threads - 1 threads of the
// pool: those that begin before the call returns. Returns when all that began have ended. Any number of callers at a
// time.
void run_together(int threads, void (*work)(void* context, int thread), void* context);

// Calls body(i, thread) for i in 0..n-1, dynamically shared; thread is 0..threads-1. body must not throw.
template <class Body>
void parallel_for(int64_t n, int threads, Body&& body) {
  threads = static_cast<int>(std::min<int64_t>(threads, n));
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  auto work = [&](int thread) {
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) body(i, thread);
  };
  run_together(
      threads, [](void* context, int thread) { (*static_cast<decltype(work)*>(context))(thread); }, &work);
}

// The same for bodies that do not ask for their thread.
template <class Body>
void parallel_for(int64_t n, Body&& body) {
  parallel_for(n, num_threads(), [&](int64_t i, int) { body(i); });
}

}  // namespace attune::cpu
