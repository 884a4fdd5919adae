// SPDX-License-Identifier: Apache-2.0
// Calls of the C ABI on a GPU, whatever kernel they get.
#pragma once

#include <memory>
#include <vector>

#include "cases/cuda_memory.h"
#include "cuda_cases.h"

namespace attune::cuda {

// And waits.
inline void plan_and_run(cases::CudaMemory& memory, const attune_attention& a) {
  attune_plan* plan = nullptr;
  ASSERT_ATTUNE_OK(attune_plan_create(&a, memory.device(), &plan));
  size_t bytes = 0;
  EXPECT_ATTUNE_OK(attune_plan_workspace_size(plan, &bytes));
  cases::Workspace workspace(memory, bytes);
  EXPECT_ATTUNE_OK(attune_run(plan, &a, workspace.buffer.device(), bytes, memory.stream().handle()));
  memory.synchronize();
  EXPECT_EQ(workspace.buffer.check_guards(), "");
  EXPECT_ATTUNE_OK(attune_plan_destroy(plan));
}

// Compiles what the cases need, side by side.
inline void warm_calls(cases::CudaMemory& memory, const std::vector<cases::Case>& list) {
  std::vector<attune_attention> attentions;
  std::vector<const attune_attention*> pointers;
  for (const cases::Case& spec : list) attentions.push_back(cases::Problem(spec).host());
  for (const attune_attention& a : attentions) pointers.push_back(&a);  // planning asks how data are aligned, no more
  ASSERT_ATTUNE_OK(attune_warm(pointers.data(), static_cast<int32_t>(pointers.size()), memory.device()));
}

}  // namespace attune::cuda
