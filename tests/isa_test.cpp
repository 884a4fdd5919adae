// SPDX-License-Identifier: Apache-2.0
// Every instruction set of this binary against the oracle, whatever the best of this machine is. A set that the machine
// lacks is a skipped test, which ctest and .ci/run report. `./dev test` builds this file with gcc and with clang.
#include <algorithm>
#include <fstream>
#include <sstream>

#include "cases/sanitizer.h"
#include "cpu/kernels.h"
#include "support.h"

namespace attune::tests {
namespace {

std::vector<cpu::BuiltIsa> built_isas() {
  int count = 0;
  const cpu::BuiltIsa* isas = cpu::built_isas(&count);
  return {isas, isas + count};
}

// Cases that depend on single SIMD functions: unusual widths, rows that see nothing.
bool on_every_isa(const std::string& name) {
  for (const char* part : {"/dim/", "masked", "window_cross", "/softcap"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

// Sanitizers have the whole table on the best set.
constexpr size_t kShares = cases::kAddressSanitizer ? 12 : 2;

class InstructionSet : public testing::TestWithParam<int> {};

TEST_P(InstructionSet, MatchesTheOracle) {
  const std::vector<cpu::BuiltIsa> isas = built_isas();
  const auto own = static_cast<size_t>(GetParam());
  if (!isas[own].runs_here) GTEST_SKIP() << "this machine lacks " << isas[own].name;
  ASSERT_TRUE(cpu::force_isa(isas[own].name));
  EXPECT_STREQ(cpu::kernels().isa, isas[own].name);
  const std::vector<cases::Case>& all = cases::all_cases();
  size_t ran = 0;
  for (size_t n = 0; n < all.size(); ++n) {
    // Beside those, another share of the table for each set.
    if (n % (kShares * isas.size()) != own && !on_every_isa(all[n].name)) continue;
    const cases::Report report = cases::run_case(all[n]);
    EXPECT_TRUE(report.passed()) << isas[own].name << ": " << all[n].name << ": " << report.failure;
    ++ran;
  }
  EXPECT_GT(ran, 100u);
  EXPECT_TRUE(cpu::force_isa(nullptr));
}

#if defined(__x86_64__) && defined(__linux__)
// A machine that is not recognised runs the wrong set, several times slower, and every answer is right.
TEST(InstructionSets, ThatRunHereAreThoseThatLinuxSees) {
  std::ifstream file("/proc/cpuinfo");
  std::vector<std::string> flags;
  for (std::string line; flags.empty() && std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;) flags.push_back(word);
  }
  ASSERT_FALSE(flags.empty());
  const auto has = [&](std::initializer_list<const char*> wanted) {
    return std::all_of(wanted.begin(), wanted.end(),
                       [&](const char* flag) { return std::find(flags.begin(), flags.end(), flag) != flags.end(); });
  };
  const bool avx2 = has({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
             avx3 = avx2 && has({"avx512f", "avx512vl", "avx512dq", "avx512bw"});
  for (const cpu::BuiltIsa& isa : built_isas()) {
    const std::string name = isa.name;
    const bool avx512bf16 = avx3 && has({"avx512_bf16", "avx512vbmi"});
    if (name == "AVX2" || name == "AVX3" || name == "AVX3+AVX512BF16") {
      EXPECT_EQ(isa.runs_here, name == "AVX2" ? avx2 : name == "AVX3" ? avx3 : avx512bf16) << name;
    }
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(Built, InstructionSet, testing::Range(0, static_cast<int>(built_isas().size())),
                         [](const testing::TestParamInfo<int>& info) {
                           std::string name = built_isas()[static_cast<size_t>(info.param)].name;
                           std::replace(name.begin(), name.end(), '+', '_');
                           return name;
                         });

#if defined(__linux__) && defined(__x86_64__)
// A table that is asked for by name has all that it can; the machine's own choice leaves out what is slow there.
TEST(InstructionSets, TakeBf16ProductsWhereTheyAreFast) {
  std::ifstream file("/proc/cpuinfo");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  ASSERT_NE(text.find("vendor_id"), std::string::npos);
  const cpu::KernelTable& own = cpu::kernels();
  EXPECT_EQ(own.fast_bf16, own.native_bf16 && text.find("GenuineIntel") == std::string::npos) << own.isa;
  ASSERT_TRUE(cpu::force_isa(own.isa));
  EXPECT_EQ(cpu::kernels().fast_bf16, own.native_bf16);
  cpu::force_isa(nullptr);
  EXPECT_EQ(&cpu::kernels(), &own);
}
#endif

// What a machine runs is a part of what was built, in the same order, and the baseline runs everywhere.
TEST(InstructionSets, OfThisMachineAreThoseBuiltThatItRuns) {
  std::vector<std::string> expected;
  for (const cpu::BuiltIsa& isa : built_isas()) {
    if (isa.runs_here) expected.emplace_back(isa.name);
  }
  int count = 0;
  const char* const* names = cpu::isa_names(&count);
  EXPECT_EQ(std::vector<std::string>(names, names + count), expected);
  EXPECT_TRUE(built_isas().back().runs_here);
}

}  // namespace
}  // namespace attune::tests
