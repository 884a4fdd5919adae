// SPDX-License-Identifier: Apache-2.0
// What the tests of kernels in the emulator share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cases/case.h"
#include "cases/memory.h"
#include "emulator/emulator.h"
#include "emulator/module.h"

namespace attune::tests {

inline constexpr const char* kNotCovered = "not covered";

// Memory of the CPU's backend that launches kernels by the emulator.
class EmulatorMemory : public cases::MemoryOver {
 public:
  EmulatorMemory() : MemoryOver(cases::host_memory()) {}
  bool launches() const override { return true; }
  void launch(const char* source, const char* entry, int64_t blocks, int64_t threads, const void* params) override {
    const auto kernel = reinterpret_cast<void (*)(const void*)>(emulator::find_kernel({source, entry, {}, 0}));
    emulator::run(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), [&] { kernel(params); });
  }
};

class Emulated : public testing::Test {
 protected:
  void SetUp() override {
    if (emulator::why_not() != nullptr) GTEST_SKIP() << emulator::why_not();
  }

  // ATTUNE_EMULATE=<n>: every n-th case of the list that the kernel covers; minutes. ATTUNE_CASE=<part of a name>: only
  // cases that contain it. run: what is wrong with a case, empty, or kNotCovered. More than at_least must be covered
  // where all are asked for.
  static void check_table(const std::vector<cases::Case>& list, int at_least,
                          const std::function<std::string(const cases::Case&)>& run) {
    const char* every = std::getenv("ATTUNE_EMULATE");
    if (every == nullptr) GTEST_SKIP() << "set ATTUNE_EMULATE to 1 for all cases of the table, to n for every n-th";
    const char* only = std::getenv("ATTUNE_CASE");
    const int step = std::max(1, std::atoi(every));
    int covered = 0, index = 0;
    for (const cases::Case& spec : list) {
      if (index++ % step != 0 || (only != nullptr && spec.name.find(only) == std::string::npos)) continue;
      const std::string failure = run(spec);
      if (failure == kNotCovered) continue;
      if (only != nullptr) printf("%s\n", spec.name.c_str());
      EXPECT_EQ(failure, "") << spec.name;
      ++covered;
    }
    EXPECT_GT(covered, only != nullptr ? 0 : at_least / step);
  }

  // The table's cases, and so many random ones.
  static std::vector<cases::Case> all_cases(uint64_t random) {
    std::vector<cases::Case> list = cases::all_cases();
    for (uint64_t seed = 0; seed < random; ++seed) list.push_back(cases::random_case(seed));
    return list;
  }
};

}  // namespace attune::tests
