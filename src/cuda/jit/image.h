// SPDX-License-Identifier: Apache-2.0
// Finds or makes the machine code of a source with its defines: bundle, disk cache, NVRTC. Needs no GPU and no driver.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/jit/bundle.h"
#include "cuda/jit/disk_cache.h"
#include "cuda/jit/module.h"
#include "cuda/jit/sources.h"

namespace attune::cuda {

inline constexpr char kArch[] = "sm_90a";  // the bundle's, and the default of Target

// The compiler's options: architecture, language, ATTUNE_NVRTC_FLAGS, the defines sorted by name.
std::vector<std::string> compiler_options(const ModuleSpec& spec);
// Names machine code by everything it was made from but the compiler. The bundle's key.
Digest module_key(const SourceUnit& unit, const std::vector<std::string>& options);
// The disk cache's key: the same with the compiler's version.
Digest cache_key(const Digest& module, const std::string& compiler_version);

class Nvrtc;

struct Image {
  std::string owned;         // machine code or PTX, or
  std::string_view bundled;  // machine code in the bundle's memory
  std::string_view bytes() const { return owned.empty() ? bundled : owned; }
  KernelOrigin origin = KernelOrigin::kCompiled;
  Digest key = {};       // of the disk cache, for kDiskCache
  std::string compiler;  // version of NVRTC, of owned
};

class ImageFinder {
 public:
  struct Options {
    std::string bundle_path, cache_directory;
    bool may_compile = true;
    int driver_version = 0;  // newest CUDA whose machine code can be loaded: 12080 is 12.8
    int driver_major() const { return driver_version / 1000; }
  };
  // From the environment: ATTUNE_BUNDLE, ATTUNE_CACHE_DIR, ATTUNE_JIT (read once, by the first kernel).
  static Options default_options(int driver_version);

  explicit ImageFinder(Options options);

  // Whether the bundle has kernels of that target.
  bool bundles(const Target& target);
  // Whether there is a compiler that may be used.
  bool can_compile() const;

  // Failure(ATTUNE_DEVICE_ERROR): not at hand, and may not or cannot be compiled; says why, what helps, and which.
  // ATTUNE_INTERNAL: does not compile. An origin in without is not looked at: its code was tried and did not load.
  Image find(const ModuleSpec& spec, bool without_bundle = false, bool without_cache = false);

  DiskCache& disk_cache() { return cache_; }

 private:
  const Bundle* bundle();
  // Why a kernel comes from nowhere, and what helps. nvrtc: null where there is none, which `absent` says.
  std::string why_not(bool without_bundle, const Nvrtc* nvrtc, const std::string& absent);

  Options options_;
  DiskCache cache_;
  std::once_flag bundle_once_;
  std::unique_ptr<Bundle> bundle_;
  std::string no_bundle_;  // why bundle_ is null
  int newer_bundle_ = 0;   // the major version of CUDA of a bundle that the driver is too old for
};

// That of the process, with default_options() of the driver's version that it was first called with.
ImageFinder& the_image_finder(int driver_version);

// "on" and "off" (any case) of ATTUNE_JIT; anything else is on, with a warning.
bool jit_enabled();

}  // namespace attune::cuda
