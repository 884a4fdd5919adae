// SPDX-License-Identifier: Apache-2.0
// qkv_prepare on the memory of any device, against the oracle: the cases of the table with new tokens or a prologue,
// with outputs of every float type beside the append.
#pragma once

#include "cases/op_problem.h"
#include "core/ops.h"
#include "support.h"

namespace attune::tests {

// Whether the case makes a qkv_prepare at all.
inline bool is_valid(const cases::PrepareProblem& prepare) {
  try {
    make_qkv_prepare(prepare.host());
    return true;
  } catch (const Failure&) {
    return false;
  }
}

// Calls f(prepare, name) for the cases with new tokens or a prologue that make a qkv_prepare.
template <typename F>
void for_each_prepare(cases::Memory& memory, F&& f) {
  int turn = 0;
  for (cases::Case spec : cases::all_cases()) {
    if (spec.name.find("prologue") != 0 && !spec.new_tokens) continue;
    const attune_dtype outs[] = {ATTUNE_FLOAT32, ATTUNE_BFLOAT16, ATTUNE_FLOAT16};
    const bool in_place = ++turn % 4 == 0;
    spec.op.operation = cases::Operation::kPrepare;
    spec.op.outputs = in_place ? cases::Outputs::kInPlace : cases::Outputs::kElsewhere;
    spec.out_dtype = outs[turn % 3];
    cases::PrepareProblem prepare(spec, memory);
    if (is_valid(prepare)) f(prepare, spec.name + (in_place ? " in place" : ""));
    if (spec.name.find("mla") == std::string::npos) continue;
    spec.op.outputs = cases::Outputs::kOnlyQInPlace;
    cases::PrepareProblem as_served(spec, memory);
    if (is_valid(as_served)) f(as_served, spec.name + " q in place");
  }
}

// Returns how many ran.
inline int check_prepare(cases::Memory& memory) {
  int ran = 0;
  for_each_prepare(memory, [&](cases::PrepareProblem& prepare, const std::string& name) {
    ++ran;
    EXPECT_EQ(prepare.run_and_check(), "") << name;
  });
  return ran;
}

}  // namespace attune::tests
