// SPDX-License-Identifier: Apache-2.0
// A directory of its own and the library's warnings, for each test of files.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/status.h"
#include "failure.h"

namespace attune::cuda {

namespace fs = std::filesystem;

inline void write_file(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

class CudaJit : public testing::Test {
 protected:
  void SetUp() override {
    mask_ = umask(022);  // what the tests write is trusted
    directory_ = fs::path(testing::TempDir()) /
                 cat("attune_jit_", getpid(), "_", testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(directory_);
    fs::create_directories(directory_);
    set_log_callback(
        [](int32_t level, const char* message, void* user) {
          if (level >= ATTUNE_LOG_WARNING) static_cast<std::vector<std::string>*>(user)->push_back(message);
        },
        &log_);
  }
  void TearDown() override {
    umask(mask_);
    set_log_callback(nullptr, nullptr);
    fs::remove_all(directory_);
  }
  std::string path(const std::string& name) const { return (directory_ / name).string(); }

  fs::path directory_;
  std::vector<std::string> log_;
  mode_t mask_ = 022;
};

}  // namespace attune::cuda
