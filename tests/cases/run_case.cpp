// SPDX-License-Identifier: Apache-2.0
// Here, in indexer_problem.cpp and in backward_problem.cpp the library is called.
#include "backward_problem.h"
#include "compare.h"
#include "indexer_problem.h"

namespace attune::cases {

std::string run(Problem& problem, attune_status* status) {
  const attune_attention device = problem.device();
  const auto failed = [&](const char* call, attune_status code) {
    if (status != nullptr) *status = code;
    return std::string(call) + ": " + attune_status_name(code) + ": " + attune_last_error();
  };
  attune_plan* plan = nullptr;
  Memory& memory = problem.arena().memory();
  if (const attune_status code = attune_plan_create(&device, memory.device(), &plan); code != ATTUNE_OK) {
    return failed("attune_plan_create", code);
  }
  struct Destroy {
    attune_plan* plan;
    ~Destroy() { attune_plan_destroy(plan); }
  } destroy{plan};
  size_t bytes = 0;
  if (const attune_status code = attune_plan_workspace_size(plan, &bytes); code != ATTUNE_OK) {
    return failed("attune_plan_workspace_size", code);
  }
  Workspace workspace(memory, bytes);
  if (const attune_status code = attune_run(plan, &device, workspace.buffer.device(), bytes, nullptr);
      code != ATTUNE_OK) {
    return failed("attune_run", code);
  }
  if (status != nullptr) *status = ATTUNE_OK;
  return workspace.buffer.check_guards();
}

Report run_case(const Case& spec, Memory& memory, int64_t sample) {
  if (spec.indexer.topk > 0) return run_indexer_case(spec, memory);
  if (spec.backward.on) return run_backward_case(spec, memory);
  Problem problem(spec, memory);
  const Expected expected = sample > 0 ? evaluate_sample(problem, sample) : evaluate(problem);
  if (std::string failure = run(problem); !failure.empty()) {
    Report report;
    report.failure = std::move(failure);
    return report;
  }
  return compare(problem, expected);
}

}  // namespace attune::cases
