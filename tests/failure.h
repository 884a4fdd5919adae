// SPDX-License-Identifier: Apache-2.0
// The library's internal errors, as tests look at them.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/status.h"

namespace attune {

// The message of the Failure that body throws; "" if it throws none.
template <class Body>
std::string failure_of(Body&& body, attune_status status = ATTUNE_INVALID_ARGUMENT) {
  try {
    body();
  } catch (const Failure& e) {
    EXPECT_EQ(e.status(), status) << e.what();
    return e.what();
  }
  return "";
}

}  // namespace attune
