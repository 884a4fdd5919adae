// SPDX-License-Identifier: Apache-2.0
// The oracle of gradients on the GPU (kernels/check/backward.cu), and a run's gradients compared with it where they
// are. Who launches the kernels is left open: a device, or the emulator.
#pragma once

#include <memory>
#include <vector>

#include "backward_problem.h"
#include "check/backward_params.h"

namespace attune::cases {

class DeviceBackwardOracle {
 public:
  static constexpr const char* kSource = "check/backward.cu";
  static constexpr const char* kEntry = "attune_backward_oracle";

  // At most `blocks` blocks of `threads` threads will run. The problem is on the device already, as before its run.
  DeviceBackwardOracle(const BackwardProblem& problem, int64_t blocks, int64_t threads);

  // For the kernel: one pointer to the parameters, in the device's memory.
  const oracle::BackwardOracleParams* params() {
    return static_cast<const oracle::BackwardOracleParams*>(params_.device());
  }
  int64_t blocks() const { return blocks_; }
  const oracle::BackwardOracleParams& device_results() const { return host_; }
  // After the kernel has ended, of gradient i of gradients_of(problem): what it must be, and how far off it may be.
  // Empty where it is absent.
  struct Result {
    std::vector<double> value, bound;
  };
  Result result(size_t gradient) const;
  std::vector<bool> q_written() const { return flags(host_.q_written); }
  std::vector<bool> kv_written() const { return flags(host_.kv_written); }
  // Of broken guards; else "".
  std::string check_guards() const;

 private:
  template <class T>
  T* add_array(const char* name, int64_t count);
  template <class T>
  std::vector<T> download(const T* device) const;
  std::vector<bool> flags(const unsigned char* device) const;

  Memory& memory_;
  int64_t blocks_;
  oracle::BackwardOracleParams host_{};
  std::vector<std::unique_ptr<DeviceArray>> arrays_;
  Buffer params_;
};

class DeviceCompareGradients {
 public:
  static constexpr const char* kSource = "check/compare_gradients.cu";
  static constexpr const char* kEntry = "attune_compare_gradients";

  // The oracle's kernel has ended before this one begins. Exactly `blocks` blocks of `threads` threads will run.
  DeviceCompareGradients(const BackwardProblem& problem, const DeviceBackwardOracle& oracle, int64_t blocks,
                         int64_t threads);

  const oracle::CompareGradientsParams* params() {
    return static_cast<const oracle::CompareGradientsParams*>(params_.device());
  }
  // After the kernel has ended. "" or how many elements are bad, and which is the first.
  std::string failure() const;

 private:
  std::vector<NamedGradient> gradients_;
  Buffer params_, verdicts_;
};

}  // namespace attune::cases
