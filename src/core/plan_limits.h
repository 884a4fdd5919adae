// SPDX-License-Identifier: Apache-2.0
// The shapes that a plan was sized for, by name: recorded when the plan is made, compared before each run.
#pragma once

#include <array>
#include <cstdint>

#include "core/problem.h"

namespace attune {

struct PlanLimit {
  enum class Rule { kSame, kAtMost };
  const char* name;
  Rule rule;
  int64_t value;
};
inline constexpr int kNumPlanLimits = 17;
using PlanLimits = std::array<PlanLimit, kNumPlanLimits>;

PlanLimits plan_limits(const Problem& p);
// Throws INVALID_ARGUMENT naming the first argument of a run that the plan was not made for.
void check_limits(const PlanLimits& planned, const Problem& run);

}  // namespace attune
