// SPDX-License-Identifier: Apache-2.0
#include "backward_bench.h"

namespace attune::cli {
namespace {

constexpr int64_t kCheckedRows = 12;

}  // namespace

BackwardBench::BackwardBench(const cases::Case& spec, cases::Memory& memory)
    : not_covered_(cases::why_not_covered(spec, memory.device())) {
  if (!not_covered_.empty()) return;
  problem_ = std::make_unique<cases::BackwardProblem>(spec, memory, cases::Forward::kLibrary);
  call_ = problem_->device();
  plan_ = std::make_unique<Plan>(*call_.linked(), memory.device());
  bytes_ = plan_->workspace_size();
  workspace_ = std::make_unique<cases::Workspace>(memory, bytes_);
}

void BackwardBench::run(void* stream) { plan_->run(*call_.linked(), workspace_->buffer.device(), bytes_, stream); }

cases::Report BackwardBench::check() {
  const cases::ExpectedGradients expected = evaluate_sample(*problem_, kCheckedRows);
  run();
  cases::Report report = compare(*problem_, expected);
  if (report.failure.empty()) report.failure = workspace_->buffer.check_guards();
  return report;
}

}  // namespace attune::cli
