// SPDX-License-Identifier: Apache-2.0
// The oracle of the GPU (kernels/check/oracle.cu) from its own source on the CPU (tests/emulator) says what reference/
// says, for cases of the whole table. Without a GPU.
#include "device_oracle_fixture.h"
#include "emulated.h"

namespace attune::tests {
namespace {

class EmulatedOracle : public Emulated {
 protected:
  static std::string run(const cases::Case& spec) {
    constexpr int64_t kBlocks = 3, kThreads = 32;
    using Kernel = void (*)(const check::OracleParams*);
    static const auto kernel = reinterpret_cast<Kernel>(
        emulator::find_kernel({cases::DeviceOracle::kSource, cases::DeviceOracle::kEntry, {}, 0}));
    return compare_oracles(spec, cases::host_memory(), kBlocks, kThreads,
                           [&](const check::OracleParams* params, int64_t blocks) {
                             emulator::run(static_cast<unsigned>(blocks), kThreads, [&] { kernel(params); });
                           });
  }
};

TEST_F(EmulatedOracle, SaysWhatTheReferenceSays) {
  const std::vector<cases::Case>& all = cases::all_cases();
  const char* every = std::getenv("ATTUNE_EMULATE");
  const char* only = std::getenv("ATTUNE_CASE");
  const size_t step = every != nullptr ? static_cast<size_t>(std::max(1, std::atoi(every))) : 11;
  int ran = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool always = all[i].name.starts_with("prologue/int8");  // the host prepares their inputs
    if (i % step != 0 && !always) continue;
    if (only != nullptr && all[i].name.find(only) == std::string::npos) continue;
    EXPECT_EQ(run(all[i]), "") << all[i].name;
    ++ran;
  }
  EXPECT_GT(ran, only != nullptr ? 0 : static_cast<int>(all.size() / step) - 1);
}

}  // namespace
}  // namespace attune::tests
