// SPDX-License-Identifier: Apache-2.0
// Offsets beyond 32 bits, and more than 65,535 queries, on a GPU. Skipped, with the reason, where there is none.
#include <string>
#include <thread>
#include <vector>

#include "cuda_run.h"
#include "far.h"

namespace attune::cuda {
namespace {

class CudaFar : public CudaCases {};

TEST_F(CudaFar, RowsAndPages) {
  cases::CudaMemory memory(kDevice);
  const DeviceMemory far(kDevice, static_cast<size_t>(tests::kFarMemory));
  const std::vector<cases::Case> list = tests::far_cases();
  warm_calls(memory, list);
  for (const cases::Case& spec : list) {
    EXPECT_EQ(tests::find_near_sighted(spec, memory, static_cast<std::byte*>(far.data()),
                                       [&](const attune_attention& a) { plan_and_run(memory, a); }),
              "")
        << spec.name;
  }
}

TEST_F(CudaFar, CacheOperationsAndTheIndexer) {
  cases::CudaMemory memory(kDevice);
  const DeviceMemory far(kDevice, static_cast<size_t>(tests::kFarMemory));
  auto* const data = static_cast<std::byte*>(far.data());
  for (const attune_kv_format format : tests::kFarFormats) {
    const auto run = [&](const attune_cache_op& op) {
      EXPECT_ATTUNE_OK(attune_cache_op_run(&op, memory.device(), memory.stream().handle()));
      memory.synchronize();
    };
    EXPECT_EQ(tests::find_near_sighted_op(format, memory, data, run), "") << format;
  }
  EXPECT_EQ(
      tests::find_near_sighted_indexer(memory, data, [&](const attune_indexer& op) { return cases::run(op, memory); }),
      "");
}

TEST_F(CudaFar, MoreThan65535Queries) {
  // Side by side, as making the data and compiling the kernels take their time.
  const std::vector<cases::Case> list = tests::many_queries();
  std::vector<std::string> failures(list.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < list.size(); ++i) {
    threads.emplace_back([&, i] {
      cases::CudaMemory memory(kDevice);
      failures[i] = cases::run_case(list[i], memory, tests::kSampledRows).failure;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < list.size(); ++i) EXPECT_EQ(failures[i], "") << list[i].name;
}

}  // namespace
}  // namespace attune::cuda
