// SPDX-License-Identifier: Apache-2.0
// ATTUNE_CASE=<part of a name>: tests of tables take only the cases whose names contain it.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "cases/case.h"

namespace attune::tests {

inline bool picks_cases() { return std::getenv("ATTUNE_CASE") != nullptr; }
inline bool is_picked(const cases::Case& spec) {
  return !picks_cases() || spec.name.find(std::getenv("ATTUNE_CASE")) != std::string::npos;
}
inline void keep_picked(std::vector<cases::Case>& list) {
  std::erase_if(list, [](const cases::Case& spec) { return !is_picked(spec); });
}

}  // namespace attune::tests
