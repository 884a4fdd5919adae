// SPDX-License-Identifier: Apache-2.0
// Environment variables, with unset and empty taken as one.
#pragma once

#include <cstdlib>
#include <string>

namespace attune::cuda {

inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace attune::cuda
