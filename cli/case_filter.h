// SPDX-License-Identifier: Apache-2.0
// What check and bench share: choosing cases, and the memory of a device.
#pragma once

#include <string>
#include <vector>

#include "cases/case.h"
#include "cases/memory.h"

namespace attune::cli {

// The cases whose name contains a match; all for "". Throws UserError for a bad expression, and when none is left.
std::vector<cases::Case> filter_cases(const std::vector<cases::Case>& all, const std::string& expression);
// Throws where the device is not there.
cases::Memory& case_memory(attune_device device);

}  // namespace attune::cli
