// SPDX-License-Identifier: Apache-2.0
#include "cpu/threads.h"

#include <atomic>

namespace attune::cpu {
namespace {

std::atomic<int> g_num_threads{0};

}  // namespace

int num_threads() {
  const int set = g_num_threads.load(std::memory_order_relaxed);
  return set > 0 ? set : std::max(1, omp_get_max_threads());
}

void set_num_threads(int count) { g_num_threads.store(count, std::memory_order_relaxed); }

}  // namespace attune::cpu
