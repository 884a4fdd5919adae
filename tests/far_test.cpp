// SPDX-License-Identifier: Apache-2.0
// Offsets beyond 32 bits: on the CPU, and in the CUDA kernels' own source there (tests/emulator). On a GPU:
// cuda_far_test.cpp.
#include "far.h"

#include <sys/mman.h>

#include "emulated_attend.h"

namespace attune::tests {
namespace {

// Address space; only what is touched takes memory.
class Reservation {
 public:
  Reservation()
      : data_(mmap(nullptr, static_cast<size_t>(kFarMemory), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reservation() {
    if (data() != nullptr) munmap(data_, static_cast<size_t>(kFarMemory));
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  std::byte* data() const { return data_ == MAP_FAILED ? nullptr : static_cast<std::byte*>(data_); }

 private:
  void* data_;
};

TEST(Far, RowsAndPagesOnTheCpu) {
  const Reservation far;
  if (far.data() == nullptr) GTEST_SKIP() << "this machine does not reserve " << kFarMemory << " bytes";
  for (const cases::Case& spec : far_cases())
    EXPECT_EQ(find_near_sighted(spec, cases::host_memory(), far.data(), plan_and_run), "") << spec.name;
}

// One of them: making the data takes longest.
TEST(Far, MoreThan65535QueriesOnTheCpu) {
  EXPECT_EQ(cases::run_case(many_queries().back(), cases::host_memory(), kSampledRows).failure, "");
}

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
