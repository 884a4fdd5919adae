// SPDX-License-Identifier: Apache-2.0
// The oracle of the GPU (kernels/check/oracle.cu) from its own source on the CPU (tests/emulator) says what reference/
// says, for cases of the whole table. Without a GPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "cases/device_compare.h"
#include "cases/stress.h"
#include "device_oracle_fixture.h"
#include "emulated.h"
#include "picked_cases.h"

namespace attune::tests {
namespace {

constexpr int64_t kBlocks = 3, kThreads = 32;

template <class Params>
void launch(const char* source, const char* entry, const Params* params, int64_t blocks) {
  const auto kernel = reinterpret_cast<void (*)(const Params*)>(emulator::find_kernel({source, entry, {}, 0}));
  emulator::run(static_cast<unsigned>(blocks), kThreads, [&] { kernel(params); });
}
void launch_oracle(const oracle::OracleParams* params, int64_t blocks) {
  launch(cases::DeviceOracle::kSource, cases::DeviceOracle::kEntry, params, blocks);
}

class EmulatedOracle : public Emulated {
 protected:
  static std::string run(const cases::Case& spec) {
    return compare_oracles(spec, cases::host_memory(), kBlocks, kThreads, launch_oracle);
  }
  static cases::Report compare_all(const cases::Problem& problem, cases::DeviceOracle& oracle) {
    cases::DeviceCompare compare(problem, oracle, kBlocks, kThreads, ATTUNE_DEVICE_CPU);
    launch(cases::DeviceCompare::kSource, cases::DeviceCompare::kEntry, compare.params(), kBlocks);
    return compare.report();
  }
};

TEST_F(EmulatedOracle, SaysWhatTheReferenceSays) {
  const std::vector<cases::Case>& all = cases::all_cases();
  const char* every = std::getenv("ATTUNE_EMULATE");
  const size_t step = every != nullptr ? static_cast<size_t>(std::max(1, std::atoi(every))) : 11;
  int ran = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool always = all[i].name.starts_with("prologue/int8");  // the host prepares their inputs
    if (i % step != 0 && !always) continue;
    if (!is_picked(all[i])) continue;
    EXPECT_EQ(run(all[i]), "") << all[i].name;
    ++ran;
  }
  EXPECT_GT(ran, picks_cases() ? 0 : static_cast<int>(all.size() / step) - 1);
}

// The outputs of a run, and with one element after the other moved by ever more: the kernel finds what compare() finds.
TEST_F(EmulatedOracle, ComparesAsTheHostDoes) {
  for (const cases::Case& spec : cases::parse_cases(R"({"area": "compared", "cases": [
      {"name": "rows", "heads": [4, 2], "head_dim": [40, 24], "kv": "dense", "seqlens_q": [3, 1, 4], "causal": true,
       "lse": true, "max_logits": true, "finished": [0, 1, 0],
       "sweep": {"dtype": ["f32", "f16", "bf16"]}},
      {"name": "codes", "heads": [2, 1], "head_dim": [32, 32], "dtype": "bf16", "out_dtype": "e4m3", "kv": "paged",
       "queries": "fixed", "seqlens_q": [2, 2], "seqlens_kv": [30, 7], "out_scale": true}]})")) {
    cases::Problem problem(spec);
    problem.arena().upload();
    cases::DeviceOracle oracle(problem, kBlocks, kThreads);
    launch_oracle(oracle.params(), oracle.blocks());
    const cases::Expected expected = cases::evaluate(problem);
    ASSERT_EQ(cases::run(problem), "") << spec.name;
    EXPECT_EQ(compare_all(problem, oracle).failure, "") << spec.name;
    const attune_attention a = problem.device();
    int good = 0, bad = 0, number = 0;
    for (const attune_tensor& t : {a.out, a.lse, a.max_logits}) {
      if (t.data == nullptr) continue;
      const auto dtype = static_cast<attune_dtype>(t.dtype);
      cases::for_each_element(t, [&](const int64_t*, std::byte* element) {
        if (number++ % 7 != 0) return;
        const double value = cases::decode(dtype, element);
        const double error = std::isnan(value) ? 1 : std::ldexp(cases::half_step(dtype, value), number % 4);
        uint64_t before = 0;
        std::memcpy(&before, element, static_cast<size_t>(cases::element_size(dtype)));
        cases::encode(dtype, std::isnan(value) ? error : value + error, element, true);
        const cases::Report host = cases::compare(problem, expected), device = compare_all(problem, oracle);
        EXPECT_EQ(host.passed(), device.passed()) << spec.name << ": " << host.failure << device.failure;
        if (!host.passed() && !std::isnan(value)) {
          EXPECT_EQ(host.failure.substr(0, host.failure.find(':')), device.worst.where) << spec.name;
        }
        ++(host.passed() ? good : bad);
        std::memcpy(element, &before, static_cast<size_t>(cases::element_size(dtype)));
      });
    }
    EXPECT_GT(good, 0) << spec.name;
    EXPECT_GT(bad, 0) << spec.name;
  }
}

// Can spoil outputs, or what lies far from them, before they are compared.
class SpoilingMemory final : public EmulatorMemory {
 public:
  void launch(const char* source, const char* entry, int64_t blocks, int64_t threads, const void* params) override {
    if (std::string_view(entry) == cases::DeviceCompare::kEntry) {
      const auto& p = *static_cast<const oracle::CompareParams*>(params);
      ++compared;
      // The last element of the last row, which no sample of rows is sure to hold.
      if (spoils) {
        int64_t last = 0;
        for (int axis = 0; axis < p.out.rank; ++axis) last += (p.out.shape[axis] - 1) * p.out.stride[axis];
        auto* x = reinterpret_cast<float*>(const_cast<char*>(p.out.data)) + last;
        *x += 0.25f;
      }
    }
    EmulatorMemory::launch(source, entry, blocks, threads, params);
  }
  int compared = 0;
  bool spoils = false;
};

// A stress case is compared whole where the memory launches the oracle's kernels.
TEST_F(EmulatedOracle, StressComparesEveryElement) {
  cases::Case spec = cases::parse_cases(R"({"area": "stress", "cases": [
      {"name": "whole", "heads": [2, 1], "head_dim": [16, 16], "kv": "paged", "seqlens_q": [1, 3, 1],
       "seqlens_kv": [5, 40, 17], "causal": true, "lse": true}]})")
                         .front();
  for (const bool spoils : {false, true}) {
    SpoilingMemory memory;
    memory.spoils = spoils;
    const cases::StressReport report = cases::stress(spec, memory, 1);
    EXPECT_EQ(report.kernel, "cpu_attention");
    EXPECT_EQ(memory.compared, spoils ? 1 : 2);  // and over fewer keys
    if (spoils) {
      EXPECT_EQ(report.failure.substr(0, report.failure.find(" of ")), "1") << report.failure;
    } else {
      EXPECT_EQ(report.failure, "");
    }
  }
}

}  // namespace
}  // namespace attune::tests
