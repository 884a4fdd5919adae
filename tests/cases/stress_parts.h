// SPDX-License-Identifier: Apache-2.0
// What looking at attention and at its backward from all sides has in common.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

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

// Of the registry, by what the plan says of itself.
std::string kernel_name(const attune_plan* plan);

// Sequences whose keys stay as many where others get fewer: with batch_invariant their bits must, too.
inline bool stays(int64_t b) { return b % 3 == 0; }
// "" where count entries of a tensor's first axis, which are sequence b's, have the bits that they had.
std::string bits_of_rows_differ(const char* name, int64_t b, const attune_tensor& host, int64_t first, int64_t count,
                                const Snapshot& before, const Snapshot& after);

// stress() of a case of the backward.
StressReport stress_backward(const Case& spec, Memory& memory, int repeats);

}  // namespace attune::cases
