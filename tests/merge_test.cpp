// SPDX-License-Identifier: Apache-2.0
// Merging partial results by lse on the CPU.
#include "merge_fixture.h"

namespace attune::tests {
namespace {

TEST(MergeOperation, MatchesTheOracle) { check_merge(cases::host_memory()); }

TEST(MergeOperation, OfOnePartKeepsItsBits) {
  cases::MergeProblem merge(merge_case({1, 5, 2, 40}, ATTUNE_FLOAT32, ATTUNE_FLOAT32, false, false),
                            cases::host_memory());
  const attune_merge op = merge.device();
  ASSERT_ATTUNE_OK(attune_merge_run(&op, kCpu, nullptr));
  EXPECT_EQ(gather(op.partial_lse), gather(op.lse));
  const std::vector<double> before = gather_values(op.partial_out), after = gather_values(op.out);
  for (size_t i = 0; i < after.size(); ++i)
    EXPECT_TRUE(std::isnan(before[i]) ? after[i] == 0 : after[i] == before[i]) << i;
}

TEST(MergeOperation, OfNothingGivesZeroAndMinusInfinity) {
  cases::MergeProblem merge(merge_case({2, 2, 2, 8}, ATTUNE_BFLOAT16, ATTUNE_FLOAT32, false, false),
                            cases::host_memory());
  attune_merge op = merge.device();
  // No partial outputs at all.
  op.partial_out.shape[0] = op.partial_lse.shape[0] = 0;
  ASSERT_ATTUNE_OK(attune_merge_run(&op, kCpu, nullptr));
  for (const double x : gather_values(op.out)) EXPECT_EQ(x, 0);
  for (const double x : gather_values(op.lse)) EXPECT_EQ(x, -kInfinity);
}

TEST(MergeOperation, NamesWhatIsWrong) {
  cases::MergeProblem merge(merge_case({2, 3, 2, 8}, ATTUNE_FLOAT32, ATTUNE_FLOAT32, true, false),
                            cases::host_memory());
  const attune_merge good = merge.device();
  const auto expect = [&](void (*spoil)(attune_merge&), const char* names) {
    attune_merge op = good;
    spoil(op);
    EXPECT_EQ(attune_merge_run(&op, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT) << names;
    EXPECT_NE(std::string(attune_last_error()).find(names), std::string::npos) << attune_last_error();
  };
  expect([](attune_merge& op) { op.struct_size = 8; }, "struct_size");
  expect([](attune_merge& op) { op.partial_out = {}; }, "partial_out");
  expect([](attune_merge& op) { op.partial_lse = {}; }, "partial_lse");
  expect([](attune_merge& op) { op.out = {}; }, "out");
  expect([](attune_merge& op) { op.partial_lse.shape[0] = 3; }, "partial_lse");
  expect([](attune_merge& op) { op.out.shape[2] = 9; }, "out");
  expect([](attune_merge& op) { op.lse.dtype = ATTUNE_FLOAT16; }, "lse");
  expect([](attune_merge& op) { op.sinks.shape[0] = 5; }, "sinks");
  expect([](attune_merge& op) { op.out.stride[0] = 1; }, "out");
  expect([](attune_merge& op) { op.partial_out.data = nullptr; }, "partial_out");
  EXPECT_EQ(attune_merge_run(nullptr, kCpu, nullptr), ATTUNE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace attune::tests
