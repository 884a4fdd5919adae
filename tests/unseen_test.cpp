// SPDX-License-Identifier: Apache-2.0
// What nobody may see changes no bit, on the CPU. On a GPU: cuda_unseen_test.cpp; the CUDA kernels on the CPU:
// emulated_unseen_test.cpp.
#include "unseen.h"

#include "cases/sanitizer.h"

namespace attune::tests {
namespace {

// A share of the cases each: under sanitizers all of them take a minute.
constexpr size_t kShares = 4;
// Bits are what counts here; addresses, which sanitizers look at, are the same in every case of the table.
constexpr size_t kStep = cases::kAddressSanitizer ? 3 : 1;
class Unseen : public testing::TestWithParam<size_t> {};

TEST_P(Unseen, ChangesNoBits) {
  const std::vector<cases::Case> all = unseen_cases();
  ASSERT_GE(all.size(), kShares);
  for (size_t i = GetParam(); i < all.size(); i += kShares * kStep)
    EXPECT_EQ(find_bits_of_unseen(all[i], cases::host_memory(), plan_and_run), "") << all[i].name;
}

INSTANTIATE_TEST_SUITE_P(Shares, Unseen, testing::Range(size_t{0}, kShares));

}  // namespace
}  // namespace attune::tests
