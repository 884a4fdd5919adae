// SPDX-License-Identifier: Apache-2.0
// One case of the backward, made real for timing.
#pragma once

#include <memory>
#include <string>

#include "attune/attune.hpp"
#include "cases/backward_problem.h"

namespace attune::cli {

class BackwardBench {
 public:
  // memory: of the device to time. Data are made where a kernel takes the case: out and lse by the device's forward.
  BackwardBench(const cases::Case& spec, cases::Memory& memory);

  // Why no kernel takes it; "" where one does.
  const std::string& not_covered() const { return not_covered_; }
  std::string describe() const { return plan_->describe(); }
  // Runs, and compares a sample of rows with the oracle.
  cases::Report check();
  // Enqueues.
  void run(void* stream = nullptr);

 private:
  std::string not_covered_;
  std::unique_ptr<cases::BackwardProblem> problem_;
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<cases::Workspace> workspace_;
  cases::BackwardCall call_{};
  size_t bytes_ = 0;
};

}  // namespace attune::cli
