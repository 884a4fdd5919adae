// SPDX-License-Identifier: Apache-2.0
#include "dispatch/warm.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "core/problem.h"
#include "core/status.h"
#include "core/versioned.h"
#include "dispatch/device.h"
#include "dispatch/registry.h"

namespace attune {
namespace {

void plan_once(const attune_attention* a, attune_device device) {
  const Known<attune_attention> known("attention", a);
  const Problem p = make_problem(*known, Data::kOptional);
  find_kernel(p, traits_of(p, *known), device).make_plan(p, device.index);
}

}  // namespace

void warm_kernels(std::span<const attune_attention* const> attentions, attune_device device) {
  check_device(device);
  std::atomic<size_t> next{0};
  std::mutex mutex;
  size_t failed_at = attentions.size();
  std::optional<Failure> failure;
  const auto work = [&] {
    for (size_t i = next.fetch_add(1); i < attentions.size(); i = next.fetch_add(1)) {
      try {
        plan_once(attentions[i], device);
      } catch (const Failure& e) {
        std::lock_guard lock(mutex);
        if (i >= failed_at) continue;
        failed_at = i;
        failure.emplace(e.status(), cat("attentions[", i, "]: ", e.what()));
      }
    }
  };
  const size_t wanted = std::min<size_t>(attentions.size(), std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  try {
    for (size_t i = 1; i < wanted; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // The threads that have started do all the work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure) throw *failure;
}

}  // namespace attune
