// SPDX-License-Identifier: Apache-2.0
// What nobody may see changes no bit, on the CPU. On a GPU: cuda_unseen_test.cpp; the CUDA kernels on the CPU:
// emulated_unseen_test.cpp.
#include "unseen.h"

namespace attune::tests {
namespace {

TEST(Unseen, ChangesNoBits) {
  for (const cases::Case& spec : unseen_cases())
    EXPECT_EQ(find_bits_of_unseen(spec, cases::host_memory(), plan_and_run), "") << spec.name;
}

}  // namespace
}  // namespace attune::tests
