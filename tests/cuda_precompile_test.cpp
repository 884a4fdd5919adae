// SPDX-License-Identifier: Apache-2.0
// What tests of tables do with ATTUNE_PRECOMPILE=1, on machines without a GPU too.
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "cuda/jit/nvrtc.h"
#include "cuda_prefill_cases.h"
#include "environment_guard.h"

namespace attune::cuda {
namespace {

namespace fs = std::filesystem;

class CudaPrecompile : public CudaCases {
 protected:
  void SetUp() override {
    std::string why;
    if (find_nvrtc(99, &why) == nullptr) GTEST_SKIP() << why;
    folder_ = fs::path(testing::TempDir()) / cat("attune_precompile_", getpid());
    environment_.set("ATTUNE_PRECOMPILE", "1");
    environment_.set("ATTUNE_CACHE_DIR", folder_.string());
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path folder_;
  tests::EnvironmentGuard environment_;
};

TEST_F(CudaPrecompile, FillsTheDiskCacheAndRunsNothing) {
  // The first is in no bundle, the second is for another kernel: of those that run, it would not be counted.
  const cases::Row row(R"("heads": [2, 1], "head_dim": [24, 40], "dtype": "bf16", "kv": "dense", "seqlens_q": [3],
      "seqlens_kv": [3])");
  const std::vector<cases::Case> list = {
      tests::make_case(row), tests::make_case(row.with(R"("head_dim": [576, 512], "kv": "paged", "shared_kv": true)"))};
  warm_all(list, ByPrefill());
  EXPECT_EQ(check_all(list, ByPrefill()), 2);
  const auto files = [&] {
    int count = 0;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) count += entry.is_regular_file() ? 1 : 0;
    return count;
  };
  const int compiled = files();
  EXPECT_GE(compiled, 1);
  warm_all(list, ByPrefill());  // finds them
  EXPECT_EQ(files(), compiled);
}

}  // namespace
}  // namespace attune::cuda
