// SPDX-License-Identifier: Apache-2.0
// Guards far from buffers, and the kernel that looks at them (kernels/check/guard.cu), from its own source on the CPU.
#include <string_view>

#include "cases/device_compare.h"
#include "cases/far_guards.h"
#include "cases/stress.h"
#include "emulated.h"
#include "support.h"

namespace attune::tests {
namespace {

constexpr size_t kBefore = 1 << 16, kNear = 1 << 20, kBehind = 1 << 22;  // more words than threads

class EmulatedGuards : public Emulated {};

TEST_F(EmulatedGuards, FindOneByte) {
  EmulatorMemory below;
  cases::FarGuards memory(below, kBefore, kNear, kBehind);
  auto* block = static_cast<std::byte*>(memory.allocate(1000));  // the first one
  memory.fill(block, std::byte{0}, 1000);
  EXPECT_EQ(memory.check_far(), "");
  const struct {
    int64_t at;
    const char* where;
  } strays[] = {{-int64_t{kBefore}, " 65536 before"},
                {-1, " 8 before"},
                {int64_t{kNear}, " 1048576 behind"},
                {int64_t{kNear} + 5003, " 1053576 behind"},
                {int64_t{kNear + kBehind} - 1, " 5242872 behind"}};
  for (const auto& stray : strays) {
    block[stray.at] = std::byte{1};
    EXPECT_NE(memory.check_far().find(stray.where), std::string::npos) << stray.where;
    EXPECT_EQ(memory.check_far(), "") << stray.where;  // it was mended
  }
  // Two that one thread sees.
  block[kNear] = block[kNear + int64_t{1056} * 256 * 8] = std::byte{1};
  EXPECT_NE(memory.check_far().find(" 1048576 behind"), std::string::npos);
  memory.release(block);
}

TEST_F(EmulatedGuards, HoldBlocksUntilTheLastOneGoes) {
  EmulatorMemory below;
  cases::FarGuards memory(below, kBefore, kNear, kBehind);
  auto *first = static_cast<std::byte*>(memory.allocate(1000)), *second = static_cast<std::byte*>(memory.allocate(1));
  EXPECT_EQ(second - first, 1024);
  void* large = memory.allocate(kNear);  // does not fit
  memory.release(first);
  EXPECT_EQ(static_cast<std::byte*>(memory.allocate(1)) - first, 1280);
  memory.release(second);
  memory.release(first + 1280);
  EXPECT_EQ(memory.allocate(1), first);
  memory.release(first);
  memory.release(large);
}

// Writes as far from an output as the blocks are long, before the output is compared.
class StrayingMemory final : public EmulatorMemory {
 public:
  void launch(const char* source, const char* entry, int64_t blocks, int64_t threads, const void* params) override {
    if (strays && std::string_view(entry) == cases::DeviceCompare::kEntry)
      const_cast<char*>(static_cast<const oracle::CompareParams*>(params)->out.data)[kNear] = 1;
    EmulatorMemory::launch(source, entry, blocks, threads, params);
  }
  bool strays = false;
};

TEST_F(EmulatedGuards, AreLookedAtByStress) {
  const cases::Case spec = make_case(
      R"({"name": "far", "heads": [2, 1], "head_dim": [16, 16], "kv": "paged", "seqlens_q": [1, 3],
          "seqlens_kv": [5, 40], "causal": true})");
  StrayingMemory below;
  cases::FarGuards memory(below, kBefore, kNear, kNear);
  for (const bool strays : {false, true, false}) {
    below.strays = strays;
    const std::string failure = cases::stress(spec, memory, 1).failure;
    EXPECT_EQ(failure.substr(0, failure.find(':')), strays ? "bytes far from all buffers were overwritten" : "");
  }
}

}  // namespace
}  // namespace attune::tests
