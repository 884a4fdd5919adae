// SPDX-License-Identifier: Apache-2.0
// Offsets beyond 32 bits in the CUDA kernels' own source, on the CPU (tests/emulator). The CPU's own: far_test.cpp.
#include "emulated_attend.h"
#include "far.h"

namespace attune::tests {
namespace {

class EmulatedFar : public Emulated {};

TEST_F(EmulatedFar, RowsAndPages) {
  const Reservation far;
  if (far.data() == nullptr) GTEST_SKIP() << "this machine does not reserve " << kFarMemory << " bytes";
  for (const cases::Case& spec : far_cases()) {
    const auto attend = [](const attune_attention& a) { cuda::emulate_attention(a, 3); };
    EXPECT_EQ(find_near_sighted(spec, cases::host_memory(), far.data(), attend), "") << spec.name;
  }
}

}  // namespace
}  // namespace attune::tests
