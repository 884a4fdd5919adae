// SPDX-License-Identifier: Apache-2.0
// Here, in indexer_problem.cpp and in backward_problem.cpp the library is called.
#include "backward_problem.h"
#include "compare.h"
#include "indexer_problem.h"

namespace attune::cases {

std::string run_planned(Memory& memory, const PlannedCall& call, attune_status* status) {
  const auto failed = [&](const std::string& name, attune_status code) {
    if (status != nullptr) *status = code;
    return name + ": " + attune_status_name(code) + ": " + attune_last_error();
  };
  attune_plan* plan = nullptr;
  if (const attune_status code = call.make(&plan); code != ATTUNE_OK) return failed(call.make_name, code);
  struct Destroy {
    attune_plan* plan;
    ~Destroy() { attune_plan_destroy(plan); }
  } destroy{plan};
  size_t bytes = 0;
  if (const attune_status code = attune_plan_workspace_size(plan, &bytes); code != ATTUNE_OK) {
    return failed("attune_plan_workspace_size", code);
  }
  Workspace workspace(memory, bytes);
  if (const attune_status code = call.run(plan, workspace.buffer.device(), bytes); code != ATTUNE_OK) {
    return failed(call.run_name, code);
  }
  if (status != nullptr) *status = ATTUNE_OK;
  return workspace.buffer.check_guards();
}

std::string run(Problem& problem, attune_status* status) {
  const attune_attention device = problem.device();
  Memory& memory = problem.arena().memory();
  const PlannedCall call{"attune_plan_create",
                         [&](attune_plan** plan) { return attune_plan_create(&device, memory.device(), plan); },
                         "attune_run",
                         [&](const attune_plan* plan, void* workspace, size_t bytes) {
                           return attune_run(plan, &device, workspace, bytes, nullptr);
                         }};
  return run_planned(memory, call, status);
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
