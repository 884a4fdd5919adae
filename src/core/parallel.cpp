// SPDX-License-Identifier: Apache-2.0
#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace attune {

void run_in_parallel(size_t n, const std::function<void(size_t)>& job) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  size_t failed_at = n;
  std::exception_ptr failure;
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) {
      try {
        job(i);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (i < failed_at) failed_at = i, failure = std::current_exception();
      }
    }
  };
  const size_t wanted = std::min<size_t>(n, std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  try {
    for (size_t i = 1; i < wanted; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // The threads that have started do all the work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace attune
