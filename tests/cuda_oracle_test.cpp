// SPDX-License-Identifier: Apache-2.0
// The oracles of the GPU (kernels/check/) on a GPU say what reference/ says, for the whole table.
#include "cuda/launch.h"
#include "cuda_cases.h"
#include "device_backward_fixture.h"

namespace attune::cuda {
namespace {

const KernelSpec kOracle = {cases::DeviceOracle::kSource, cases::DeviceOracle::kEntry, {}, 0};

class CudaOracle : public CudaCases {};

TEST_F(CudaOracle, SaysWhatTheReferenceSays) {
  constexpr int64_t kBlocks = 64;
  constexpr uint32_t kThreads = 128;
  const Stream stream(kDevice);
  cases::CudaMemory memory(kDevice);
  const CompiledKernel& kernel = get_kernel(kOracle, kDevice);
  int ran = 0;
  for (const cases::Case& spec : table_and_random_cases(100)) {
    const auto launch = [&](const oracle::OracleParams* params, int64_t blocks) {
      LaunchConfig config;
      config.grid[0] = static_cast<uint32_t>(blocks);
      config.block[0] = kThreads;
      config.stream = stream.handle();
      launch_kernel(kernel, config, params);
      stream.synchronize();
    };
    EXPECT_EQ(tests::compare_oracles(spec, memory, kBlocks, kThreads, launch), "") << spec.name;
    ++ran;
  }
  EXPECT_GT(ran, 0);
}

TEST_F(CudaOracle, SaysWhatTheReferenceSaysOfGradients) {
  cases::CudaMemory memory(kDevice);
  std::vector<cases::Case> list = cases::backward_cases();
  for (uint64_t seed = 0; seed < 100; ++seed) list.push_back(cases::random_backward_case(seed));
  for (const cases::Case& spec : list)
    EXPECT_EQ(tests::compare_backward_oracles(spec, memory, 64, 128), "") << spec.name;
}

}  // namespace
}  // namespace attune::cuda
