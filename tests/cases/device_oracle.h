// SPDX-License-Identifier: Apache-2.0
// A problem for the oracle on the GPU (kernels/check/oracle.cu), and what it says. Who launches it is left open: a
// device, or the emulator. Prologues are applied here, by reference/.
#pragma once

#include <memory>
#include <vector>

#include "check/oracle_params.h"
#include "problem.h"
#include "reference/reference.h"

namespace attune::cases {

oracle::Tensor device_tensor(const attune_tensor& t);
// The descriptor on the device, without results, and with the inputs as they are before a prologue.
oracle::OracleParams described(const Problem& problem);

class DeviceOracle {
 public:
  static constexpr const char* kSource = "check/oracle.cu";
  static constexpr const char* kEntry = "attune_oracle";

  // Takes the problem's memory. At most `blocks` blocks of `threads` threads will run. The problem is on the device
  // already, as before its run.
  DeviceOracle(const Problem& problem, int64_t blocks, int64_t threads);

  // For the kernel: one pointer to the parameters, in the device's memory.
  const oracle::OracleParams* params() { return static_cast<const oracle::OracleParams*>(params_->device()); }
  int64_t blocks() const { return blocks_; }
  // After the kernel has ended: row-major [rows][heads], as reference::attention() gives them.
  std::vector<reference::RowResult> results() const;
  // Of broken guards; else "".
  std::string check_guards() const;
  int64_t rows() const { return host_.rows; }
  int64_t heads() const { return host_.heads_q; }
  int64_t head_dim_v() const { return host_.head_dim_v; }

 private:
  template <class T>
  T* add_result(const char* name, int64_t count);
  void* add_array(const char* name, int64_t bytes);
  void prepare(const Problem& problem);

  Memory& memory_;
  int64_t blocks_;
  oracle::OracleParams host_{};
  std::vector<std::unique_ptr<Buffer>> prepared_;
  std::vector<std::unique_ptr<DeviceArray>> arrays_;  // results and scratch
  std::unique_ptr<Buffer> params_;
};

}  // namespace attune::cases
