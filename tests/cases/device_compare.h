// SPDX-License-Identifier: Apache-2.0
// All outputs of a run against the oracle of the GPU, where they are (kernels/check/compare.cu).
#pragma once

#include "check/compare_params.h"
#include "compare.h"
#include "device_oracle.h"

namespace attune::cases {

class DeviceCompare {
 public:
  static constexpr const char* kSource = "check/compare.cu";
  static constexpr const char* kEntry = "attune_compare";

  // The oracle's kernel has ended before this one begins. Exactly `blocks` blocks of `threads` threads will run.
  // device_type: whose kernels made the outputs.
  DeviceCompare(const Problem& problem, DeviceOracle& oracle, int64_t blocks, int64_t threads, int32_t device_type);

  // For the kernel: one pointer to the parameters, in the device's memory.
  const oracle::CompareParams* params() { return static_cast<const oracle::CompareParams*>(params_.device()); }
  // After the kernel has ended. Says how many elements are bad, and which is the first; worst stays empty.
  Report report() const;

 private:
  const DeviceOracle& oracle_;
  Buffer params_, verdicts_;
};

}  // namespace attune::cases
