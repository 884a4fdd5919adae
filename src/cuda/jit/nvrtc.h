// SPDX-License-Identifier: Apache-2.0
// NVRTC, NVIDIA's run-time compiler, opened at run time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/architecture.h"
#include "cuda/jit/sources.h"

namespace attune::cuda {

struct Compiled {
  std::string code;  // machine code; PTX, with a 0 at its end, for an architecture "compute_.."
  std::string log;   // warnings; "" if none
};

class Nvrtc {
 public:
  // Opens one library. Null, with one sentence in *why, where it does not open or is no NVRTC of CUDA 12 or later.
  static std::unique_ptr<Nvrtc> open(const std::string& path, std::string* why);

  int major() const { return major_; }
  int minor() const { return minor_; }
  std::string version() const;  // "13.0"
  const std::string& path() const { return path_; }

  // True if the compiler does not know a target, which becomes PTX of the newest architecture before it.
  bool restrict(Target* target) const;
  // Compiles. Failure(ATTUNE_INTERNAL) with the compiler's messages. Thread-safe.
  Compiled compile(const SourceUnit& unit, const std::vector<std::string>& options) const;

 private:
  struct Api;
  Nvrtc() = default;

  std::shared_ptr<const Api> api_;
  int major_ = 0, minor_ = 0;
  std::vector<int> capabilities_;  // that it knows, ascending
  std::string path_;
};

// The places where NVRTC is looked for, in order: ATTUNE_NVRTC alone if set; else the loader's path, CUDA_HOME and
// CUDA_PATH, beside this library and in Python's site-packages (PyPI's nvidia-cuda-nvrtc), conda, /usr/local/cuda.
std::vector<std::string> nvrtc_candidates();

// The first of them whose major version is at most max_major: a driver does not load the code of a newer major version.
// Found once for each max_major; null and why in *why (may be null) where there is none.
const Nvrtc* find_nvrtc(int max_major, std::string* why);
// How to get one that such a driver loads code of: "pip install nvidia-cuda-nvrtc-cu12, or set ATTUNE_NVRTC".
std::string nvrtc_advice(int max_major);

// Of find_nvrtc where there is no driver, so that any version will do.
inline constexpr int kAnyMajor = 99;

}  // namespace attune::cuda
