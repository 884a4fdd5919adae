// SPDX-License-Identifier: Apache-2.0
// The backward on a GPU through the C API: every case of the table and random ones that its coverage takes, against the
// oracle, twice with the same bits.
#include <atomic>
#include <thread>

#include "cases/backward_problem.h"
#include "cases/cuda_memory.h"
#include "cuda/backward/backward.h"
#include "cuda/backward/config.h"
#include "cuda_fixture.h"
#include "support.h"

namespace attune::cuda {
namespace {

constexpr int kRandomBackwardCasesOnCuda = 600;

class CudaBackward : public CudaFixture {
 protected:
  // "" if a case is right, and a second run gives the same bits; or is not covered. ran: how many were.
  static std::string check(const cases::Case& spec, std::atomic<int>& ran) {
    cases::CudaMemory memory(kDevice);
    cases::BackwardProblem problem(spec, memory);
    cases::BackwardCall call = problem.device();
    if (attune_attention_backward_supported(call.linked(), memory.device()) == ATTUNE_UNSUPPORTED) return "";
    ++ran;
    std::vector<std::vector<std::byte>> first;
    const auto twice = [&](const cases::BackwardCall& device) {
      for (int i = 0; i < 2; ++i) {
        problem.arena().upload();
        if (std::string failure = cases::run(device, memory); !failure.empty()) return failure;
        std::vector<std::vector<std::byte>> bytes;
        for (const auto& buffer : problem.arena().buffers()) bytes.push_back(buffer->download());
        if (i > 0 && bytes != first) return std::string("two runs differ");
        first = std::move(bytes);
      }
      return std::string();
    };
    return cases::run_and_check(problem, twice).failure;
  }

  // Compiles what the cases need, side by side.
  static void warm_all(const std::vector<cases::Case>& list) {
    const DeviceInfo& info = tested_device();
    std::vector<KernelSpec> specs;
    for (const cases::Case& spec : list) {
      cases::BackwardProblem problem(spec, cases::host_memory(), cases::Forward::kLibrary);
      cases::BackwardCall call = problem.host();
      const BackwardProblem p = make_backward(*call.linked(), call.attention, Data::kOptional);
      for (const Kernel* kernel : {&backward_kernel(), &backward_fp32_kernel(), &backward_mma_kernel()}) {
        if (!kernel->coverage.difference(traits_of(p, call.attention)).empty() || !kernel->backward_refusal(p).empty())
          continue;
        const backward::Config c =
            kernel == &backward_kernel()
                ? backward::choose_config(p)
                : backward::choose_mma_config(p, {info.shared_bytes_per_sm, info.shared_bytes_per_block});
        for (const backward::Launch& launch : backward::launches(c)) specs.push_back(launch.kernel);
        break;
      }
    }
    warm_or_precompile(specs);
  }

  // Side by side, as the oracle takes its time.
  static int check_all(const std::vector<cases::Case>& list) {
    if (precompiles()) return static_cast<int>(list.size());
    std::atomic<int> ran{0};
    std::atomic<size_t> next{0};
    std::vector<std::string> failures(list.size());
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < std::clamp(std::thread::hardware_concurrency(), 1u, 16u); ++t) {
      threads.emplace_back([&] {
        for (size_t i = next++; i < list.size(); i = next++) {
          try {
            failures[i] = check(list[i], ran);
          } catch (const std::exception& e) {
            failures[i] = e.what();
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < list.size(); ++i) EXPECT_EQ(failures[i], "") << list[i].name;
    return ran;
  }
};

TEST_F(CudaBackward, MatchesTheOracle) {
  std::vector<cases::Case> list = cases::backward_cases();
  for (uint64_t seed = 0; seed < kRandomBackwardCasesOnCuda; ++seed) list.push_back(cases::random_backward_case(seed));
  warm_all(list);
  EXPECT_GT(check_all(list), 45);
}

// Empty tensors of torch have no address. dsinks and dt5_bias are 0.
TEST_F(CudaBackward, NothingAtAllNeedsNoAddress) {
  for (const char* sinks : {R"("causal": true)", R"("sinks": "normal")", R"("t5_buckets": 8)"}) {
    cases::CudaMemory memory(kDevice);
    const cases::Row row(R"("name": "x", "heads": [2, 1], "head_dim": [64, 64], "dtype": "bf16", "seqlens_q": [0],
                            "seqlens_kv": [0], "backward": {})");
    cases::BackwardProblem problem(tests::make_case(row.with(sinks)), memory);
    const auto run = [&](cases::BackwardCall call) {
      for (attune_tensor* t : {&call.attention.q, &call.attention.k, &call.attention.v, &call.attention.out,
                               &call.attention.lse, &call.op.dout, &call.op.dq, &call.op.dk, &call.op.dv})
        t->data = nullptr;
      return cases::run(call, memory);
    };
    EXPECT_EQ(cases::run_and_check(problem, run).failure, "") << sinks;
  }
}

// What the axes of the registry cannot say is refused with its reason.
TEST_F(CudaBackward, RefusesWhatItCannotDo) {
  const auto why = [](const char* members) {
    const cases::Case spec = tests::make_case(
        cases::Row(R"("name": "x", "heads": [2, 1], "head_dim": [64, 64], "dtype": "bf16", "seqlens_q": [20],
                      "seqlens_kv": [20], "backward": {})")
            .with(members));
    cases::CudaMemory memory(kDevice);
    cases::BackwardProblem problem(spec, memory);
    cases::BackwardCall call = problem.device();
    return attune_attention_backward_supported(call.linked(), memory.device()) == ATTUNE_UNSUPPORTED
               ? std::string(attune_last_error())
               : "";
  };
  EXPECT_EQ(why(R"("causal": true)"), "");
  EXPECT_EQ(why(R"("softcap": 3, "sinks": "normal")"), "");
  EXPECT_EQ(why(R"("alibi": 1)"), "");
  EXPECT_EQ(why(R"("t5_buckets": 16, "backward": {"outputs": ["dq", "dk", "dv"]})"), "");
  EXPECT_EQ(why(R"("t5_buckets": 16, "bias": 2)"), "");
  EXPECT_EQ(why(R"("t5_buckets": 600, "t5_max_distance": 5000)"),
            "no kernel covers this; the nearest is cuda_backward, which does not take more than 128 T5 buckets in one "
            "direction");
  EXPECT_EQ(why(R"("dtype": "f32")"), "");
  EXPECT_EQ(why(R"("strides": "odd")"), "");  // cuda_backward_mma's
  EXPECT_EQ(why(R"("dtype": "f32", "bias": 1)"), "");
}

}  // namespace
}  // namespace attune::cuda
