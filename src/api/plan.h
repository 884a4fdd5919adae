// SPDX-License-Identifier: Apache-2.0
// What attune_plan is: of attention, or of its backward.
#pragma once

#include <memory>

#include "attune/attune.h"
#include "core/backward.h"
#include "core/kernel.h"
#include "core/plan_limits.h"

struct attune_plan {
  const attune::Kernel* kernel;
  attune_device device;
  attune::Traits traits;
  attune::PlanLimits limits;
  std::unique_ptr<attune::KernelPlan> impl;        // of attention, else null
  std::unique_ptr<attune::BackwardPlan> backward;  // of its backward, else null
  attune::BackwardDtypes dtypes{};                 // of the backward
};

namespace attune {

// Names the first thing that a run asks for and the plan was not made for.
void check_fits(const attune_plan& plan, const Problem& p, const Traits& traits);

}  // namespace attune
