// SPDX-License-Identifier: Apache-2.0
// Tests on the first GPU. They are skipped, with the reason, where there is none that can be used.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "cuda/device.h"

namespace attune::cuda {

inline constexpr int32_t kDevice = 0;

class CudaFixture : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
    if (!devices()[kDevice].usable()) GTEST_SKIP() << devices()[kDevice].why_not;
  }
};

}  // namespace attune::cuda
