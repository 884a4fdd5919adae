// SPDX-License-Identifier: Apache-2.0
// What looking at attention and at its backward from all sides has in common.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

#include "beside.h"
#include "compare.h"
#include "stress.h"

namespace attune::cases {

// The call failed; what() names it.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void require(attune_status status, const char* call);

struct DestroyPlan {
  void operator()(attune_plan* plan) const { attune_plan_destroy(plan); }
};
using PlanPtr = std::unique_ptr<attune_plan, DestroyPlan>;

// Rows that the host's oracle computes: all that is checked, or beside those of the oracle on the device.
inline constexpr int64_t kSampledRows = 48, kSampledRowsBesideAll = 2;
// The grids of that oracle and of its comparison.
inline constexpr int64_t kOracleBlocks = 1056, kCompareBlocks = 264, kOracleThreads = 128;

// A plan with a workspace of its own, between guards.
class PlannedRunner {
 public:
  bool covered() const { return plan_ != nullptr; }
  const std::string& kernel() const { return kernel_; }  // of the registry
  std::string check_guards() const { return workspace_->buffer.check_guards(); }
  // A workspace that is large enough for both plans.
  Workspace& larger_workspace(const PlannedRunner& other) const {
    return bytes_ < other.bytes_ ? *other.workspace_ : *workspace_;
  }

 protected:
  explicit PlannedRunner(Memory& memory) : memory_(memory) {}
  // Takes what attune_plan_create, or a call like it, has made. Nothing if that says UNSUPPORTED.
  void take(attune_status status, const char* call, attune_plan* plan);

  attune_plan* plan() const { return plan_.get(); }
  size_t bytes() const { return bytes_; }
  void* workspace() const { return workspace_->buffer.device(); }
  Memory& memory() const { return memory_; }

 private:
  Memory& memory_;
  PlanPtr plan_;
  std::unique_ptr<Workspace> workspace_;
  size_t bytes_ = 0;
  std::string kernel_;
};

// One of two plans that run at the same time. run: workspace null: in the runner's own.
struct PlannedSide {
  Arena& arena;
  const PlannedRunner& runner;
  std::function<void(void* stream, Workspace* workspace)> run;
};
// Runs both beside each other, then in turn in one workspace, as the plans of a model's layers do. first: what one has
// given alone. check: what is wrong with the other's buffers after its first run, by the oracle. "" if all is well.
std::string run_two_plans(const PlannedSide& one, const Outcome& first, const PlannedSide& other,
                          const std::function<std::string()>& check, int64_t& runs);

// Sequences whose keys stay as many where others get fewer: with batch_invariant their bits must, too.
inline bool stays(int64_t b) { return b % 3 == 0; }
// "" where count entries of a tensor's first axis, which are sequence b's, have the bits that they had.
std::string bits_of_rows_differ(const char* name, int64_t b, const attune_tensor& host, int64_t first, int64_t count,
                                const Snapshot& before, const Snapshot& after);

// stress() of a case of the backward.
StressReport stress_backward(const Case& spec, Memory& memory, int repeats, const Wanted& wanted);

}  // namespace attune::cases
