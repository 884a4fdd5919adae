// SPDX-License-Identifier: Apache-2.0
// Tests on the first GPU. They are skipped, with the reason, where there is none that can be used.
//
// ATTUNE_PRECOMPILE=1: tests of tables run nothing. What they would run, but for kernels of prologues, is compiled into
// the disk cache, for an H200. That needs no GPU, whose time is then not spent on the compiler. Other tests are not for
// it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "cuda/device.h"
#include "cuda/jit/image.h"
#include "cuda/kernel.h"

namespace attune::cuda {

inline constexpr int32_t kDevice = 0;

inline bool precompiles() {
  const char* const value = std::getenv("ATTUNE_PRECOMPILE");
  return value != nullptr && std::string(value) == "1";
}

// The device that kernels are tested on, or compiled for.
inline const DeviceInfo& tested_device() {
  if (!precompiles()) return require_device(kDevice);
  static const DeviceInfo h200 = [] {
    DeviceInfo info;
    info.num_sms = 132;
    const Architecture& a = *find_architecture(info.target.name);
    info.shared_bytes_per_block = a.shared_a_block, info.shared_bytes_per_sm = a.shared_per_sm;
    return info;
  }();
  return h200;
}

// Loads what a test needs, or compiles it into the disk cache, side by side.
inline void warm_or_precompile(const std::vector<KernelSpec>& specs) {
  if (!precompiles()) return warm(specs, kDevice);
  std::map<std::string, ModuleSpec> by_name;
  for (const KernelSpec& spec : specs) {
    const ModuleSpec module{spec.source, spec.defines};
    by_name[module_name(module)] = module;
  }
  std::vector<ModuleSpec> modules;
  for (const auto& [name, module] : by_name) modules.push_back(module);
  constexpr int kDriver = 13000;  // CUDA 13.0
  ImageFinder finder(ImageFinder::default_options(kDriver));
  run_in_parallel(modules.size(), [&](size_t i) { finder.find(modules[i]); });
}

class CudaFixture : public testing::Test {
 protected:
  void SetUp() override {
    if (precompiles()) return;
    if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
    if (!devices()[kDevice].usable()) GTEST_SKIP() << devices()[kDevice].why_not;
  }
};

}  // namespace attune::cuda
