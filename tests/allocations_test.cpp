// SPDX-License-Identifier: Apache-2.0
// A run allocates nothing: every run of every test is watched (allocations.cpp). Here: that the watch sees what it is
// to.
#include "allocations.h"

#include <memory>

#include "support.h"

namespace attune::tests {
namespace {

TEST(Allocations, AreCountedAndRunsAreWatched) {
  if (!counts_allocations()) GTEST_SKIP() << "this build does not count allocations";
  const int64_t before = num_allocations();
  { const std::vector<int> vector(100); }
  const auto aligned = std::unique_ptr<void, void (*)(void*)>(std::aligned_alloc(64, 128), std::free);
  EXPECT_GE(num_allocations(), before + 2);

  cases::Problem problem(make_case(R"({"name": "x", "heads": [4, 2], "seqlens_q": [40, 3], "seqlens_kv": [40, 30]})"));
  const int64_t runs = num_watched_runs();
  plan_and_run(problem.device());
  EXPECT_EQ(num_watched_runs(), runs + 1);
}

}  // namespace
}  // namespace attune::tests
