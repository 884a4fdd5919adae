// SPDX-License-Identifier: Apache-2.0
#include "backward_bench.h"

#include <algorithm>

namespace attune::cli {
namespace {

constexpr int64_t kCheckedRows = 12;

// Of sequences so short that data take no time.
std::string why_not_covered(cases::Case spec, attune_device device) {
  for (auto* lengths : {&spec.seqlens_q, &spec.seqlens_kv}) std::fill(lengths->begin(), lengths->end(), 1);
  cases::BackwardCall call = cases::BackwardProblem(spec).device();  // for planning, which looks at no data
  const Support support = supported(*call.linked(), device);
  return support.status == ATTUNE_UNSUPPORTED ? support.reason : "";
}

}  // namespace

BackwardBench::BackwardBench(const cases::Case& spec, cases::Memory& memory)
    : memory_(memory), not_covered_(why_not_covered(spec, memory.device())) {
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
