// SPDX-License-Identifier: Apache-2.0
// The oracle of the GPU (kernels/check/oracle.cu) on a GPU says what reference/ says, for the whole table.
#include "cuda/launch.h"
#include "cuda_cases.h"
#include "device_oracle_fixture.h"

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

}  // namespace
}  // namespace attune::cuda
