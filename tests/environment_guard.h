// SPDX-License-Identifier: Apache-2.0
// Environment variables that a test sets until it ends.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace attune::tests {

class EnvironmentGuard {
 public:
  EnvironmentGuard() = default;
  EnvironmentGuard(const EnvironmentGuard&) = delete;
  EnvironmentGuard& operator=(const EnvironmentGuard&) = delete;
  ~EnvironmentGuard() {
    for (; !before_.empty(); before_.pop_back()) {
      const auto& [name, value] = before_.back();
      value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
    }
  }
  void set(const char* name, const std::string& value) {
    const char* const before = std::getenv(name);
    before_.emplace_back(name, before != nullptr ? std::optional<std::string>(before) : std::nullopt);
    setenv(name, value.c_str(), 1);
  }

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};

}  // namespace attune::tests
