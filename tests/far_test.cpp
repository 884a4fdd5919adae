// SPDX-License-Identifier: Apache-2.0
// Offsets beyond 32 bits, on the CPU. In the CUDA kernels' own source there: emulated_far_test.cpp; on a GPU:
// cuda_far_test.cpp.
#include "far.h"

namespace attune::tests {
namespace {

TEST(Far, RowsAndPagesOnTheCpu) {
  const Reservation far;
  if (far.data() == nullptr) GTEST_SKIP() << "this machine does not reserve " << kFarMemory << " bytes";
  for (const cases::Case& spec : far_cases())
    EXPECT_EQ(find_near_sighted(spec, cases::host_memory(), far.data(), plan_and_run), "") << spec.name;
}

TEST(Far, CacheOperationsAndTheIndexerOnTheCpu) {
  const Reservation far;
  if (far.data() == nullptr) GTEST_SKIP() << "this machine does not reserve " << kFarMemory << " bytes";
  for (const attune_kv_format format : kFarFormats) {
    const auto run = [](const attune_cache_op& op) { EXPECT_ATTUNE_OK(attune_cache_op_run(&op, kCpu, nullptr)); };
    EXPECT_EQ(find_near_sighted_op(format, cases::host_memory(), far.data(), run), "") << format;
  }
  const auto run = [](const attune_indexer& op) { return cases::run(op, cases::host_memory()); };
  EXPECT_EQ(find_near_sighted_indexer(cases::host_memory(), far.data(), run), "");
}

// One of them: making the data takes longest.
TEST(Far, MoreThan65535QueriesOnTheCpu) {
  EXPECT_EQ(cases::run_case(many_queries().back(), cases::host_memory(), kSampledRows).failure, "");
}

}  // namespace
}  // namespace attune::tests
