// SPDX-License-Identifier: Apache-2.0
// The oracle of gradients on the GPU (kernels/check/backward.cu), and the comparison with it, from their own sources on
// the CPU (tests/emulator). Without a GPU.
#include <cmath>
#include <cstring>
#include <string_view>

#include "cases/stress.h"
#include "device_backward_fixture.h"
#include "emulated.h"
#include "picked_cases.h"
#include "support.h"

namespace attune::tests {
namespace {

using cases::BackwardProblem;
using cases::DeviceBackwardOracle;
using cases::DeviceCompareGradients;

constexpr int64_t kBlocks = 3, kThreads = 32;

class EmulatedBackwardOracle : public Emulated {
 protected:
  static std::string check(const cases::Case& spec) {
    EmulatorMemory memory;
    return compare_backward_oracles(spec, memory, kBlocks, kThreads);
  }
};

TEST_F(EmulatedBackwardOracle, SaysWhatTheReferenceSays) {
  const std::vector<cases::Case>& all = cases::backward_cases();
  const char* every = std::getenv("ATTUNE_EMULATE");
  const size_t step = every != nullptr ? static_cast<size_t>(std::max(1, std::atoi(every))) : 7;
  int ran = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool asked = picks_cases() ? is_picked(all[i]) : i % step == 0;
    if (!asked) continue;
    EXPECT_EQ(check(all[i]), "") << all[i].name;
    ++ran;
  }
  EXPECT_GT(ran, picks_cases() ? 0 : static_cast<int>(all.size() / step) - 1);
}

// Every term at once, small; and what the masks leave of it.
TEST_F(EmulatedBackwardOracle, OfEveryTerm) {
  const cases::Row row(R"("name": "terms", "heads": [4, 2], "head_dim": [12, 8], "seqlens_q": [9, 0, 5],
      "seqlens_kv": [9, 4, 13], "backward": {"dlse": true}, "dtype": "f16")");
  for (const char* members :
       {R"("softcap": 4, "alibi": 1, "bias": 2, "t5_buckets": 16, "sinks": "mixed", "causal": true)",
        R"("alibi": 2, "alibi_sqrt": true, "bias": 1, "new_token_bias": true, "strides": "odd")",
        R"("window": [3, 2], "ranges": [[1, 6], [0, 3], [5, 12]], "t5_buckets": 8, "t5_bidirectional": true)",
        R"("mask_bits": 2, "seqused": true, "strides": "transposed", "sinks": "normal")",
        R"("queries": "fixed", "seqlens_q": [7, 7, 7], "softmax_scale": -0.2, "causal": true, "bias": 1)"})
    EXPECT_EQ(check(make_case(row.with(members))), "") << members;
}

// Gradients of a run, and with one element after the other moved by ever more: the kernel finds what compare() finds.
TEST_F(EmulatedBackwardOracle, ComparesAsTheHostDoes) {
  for (const char* dtype : {"f32", "f16", "bf16"}) {
    EmulatorMemory memory;
    BackwardProblem problem(
        make_case(
            cases::Row(R"("name": "compared", "heads": [2, 1], "head_dim": [8, 12], "seqlens_q": [3, 1], "causal": true,
            "seqlens_kv": [4, 2], "strides": "odd", "bias": 1, "sinks": "normal", "t5_buckets": 8, "backward": {})")
                .set("dtype", dtype)),
        memory);
    DeviceBackwardOracle device(problem, kBlocks, kThreads);
    memory.launch(DeviceBackwardOracle::kSource, DeviceBackwardOracle::kEntry, device.blocks(), kThreads,
                  device.params());
    const cases::ExpectedGradients expected = evaluate(problem);
    ASSERT_EQ(cases::run(problem.device(), memory), "");
    const auto on_device = [&] {
      DeviceCompareGradients compare(problem, device, kBlocks, kThreads);
      memory.launch(DeviceCompareGradients::kSource, DeviceCompareGradients::kEntry, kBlocks, kThreads,
                    compare.params());
      return compare.failure();
    };
    EXPECT_EQ(on_device(), "");
    const cases::BackwardCall call = problem.device();
    const attune_attention_backward& op = call.op;
    int good = 0, bad = 0, number = 0;
    for (const attune_tensor& t : {op.dq, op.dk, op.dv, op.dsinks, op.dbias, op.dt5_bias}) {
      const auto type = static_cast<attune_dtype>(t.dtype);
      const auto size = static_cast<size_t>(cases::element_size(type));
      cases::for_each_element(t, [&](const int64_t*, std::byte* element) {
        if (number++ % 5 != 0) return;
        const double value = cases::decode(type, element);
        uint64_t before = 0;
        std::memcpy(&before, element, size);
        const double step = std::isnan(value) ? 1 : std::ldexp(cases::half_step(type, value), 2 * (number % 9));
        cases::encode(type, std::isnan(value) ? step : value + step, element);
        const std::string host = compare(problem, expected).failure, of_device = on_device();
        EXPECT_EQ(host.empty(), of_device.empty()) << dtype << ": " << host << of_device;
        ++(host.empty() ? good : bad);
        std::memcpy(element, &before, size);
      });
    }
    EXPECT_GT(good, 0) << dtype;
    EXPECT_GT(bad, 0) << dtype;
  }
}

// Can spoil the last element of dv before it is compared.
class SpoilingMemory final : public EmulatorMemory {
 public:
  void launch(const char* source, const char* entry, int64_t blocks, int64_t threads, const void* params) override {
    if (std::string_view(entry) == DeviceCompareGradients::kEntry) {
      ++compared;
      const oracle::Tensor& t = static_cast<const oracle::CompareGradientsParams*>(params)->gradients[2].actual;
      int64_t last = 0;
      for (int axis = 0; axis < t.rank; ++axis) last += (t.shape[axis] - 1) * t.stride[axis];
      if (spoils) reinterpret_cast<float*>(const_cast<char*>(t.data))[last] += 0.25f;
    }
    EmulatorMemory::launch(source, entry, blocks, threads, params);
  }
  int compared = 0;
  bool spoils = false;
};

// A stress case is compared whole where the memory launches the oracle's kernels.
TEST_F(EmulatedBackwardOracle, StressComparesEveryElement) {
  const cases::Case spec = make_case(R"({"name": "whole", "heads": [2, 1], "head_dim": [16, 16], "seqlens_q": [7, 3],
      "seqlens_kv": [7, 21], "seqused": true, "causal": true, "backward": {}})");
  for (const bool spoils : {false, true}) {
    SpoilingMemory memory;
    memory.spoils = spoils;
    const cases::StressReport report = cases::stress(spec, memory, 1);
    EXPECT_EQ(report.kernel, "cpu_backward");
    EXPECT_GE(memory.compared, spoils ? 1 : 3);  // with a smaller batch, and with fewer keys
    if (spoils) {
      EXPECT_EQ(report.failure.substr(0, 5), "1 of ") << report.failure;
      EXPECT_NE(report.failure.find("first dv[30, 0, 15]"), std::string::npos) << report.failure;
    } else {
      EXPECT_EQ(report.failure, "");
    }
  }
}

}  // namespace
}  // namespace attune::tests
