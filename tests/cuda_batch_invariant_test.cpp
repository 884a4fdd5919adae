// SPDX-License-Identifier: Apache-2.0
// With batch_invariant a sequence has the same bits alone and in any batch, on a GPU, whatever kernel a call gets.
// Skipped, with the reason, where there is none.
#include "batch_of.h"
#include "cases/cuda_memory.h"
#include "cuda_cases.h"

namespace attune::cuda {
namespace {

class CudaBatchInvariant : public CudaCases {};

void plan_and_run(cases::CudaMemory& memory, const attune_attention& a) {
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

TEST_F(CudaBatchInvariant, EachSequenceHasTheSameBitsInAnyBatch) {
  cases::CudaMemory memory(kDevice);
  std::vector<cases::Case> list = tests::batch_invariant_cases();
  if (const char* only = std::getenv("ATTUNE_CASE"); only != nullptr)
    std::erase_if(list, [&](const cases::Case& spec) { return spec.name.find(only) == std::string::npos; });
  // Kernels are compiled side by side.
  std::vector<std::unique_ptr<cases::Problem>> problems;
  std::vector<attune_attention> attentions;
  std::vector<const attune_attention*> pointers;
  for (const cases::Case& spec : list) {
    problems.push_back(std::make_unique<cases::Problem>(spec));
    attentions.push_back(problems.back()->host());
  }
  for (const attune_attention& a : attentions) pointers.push_back(&a);
  ASSERT_ATTUNE_OK(attune_warm(pointers.data(), static_cast<int32_t>(pointers.size()), memory.device()));
  for (const cases::Case& spec : list) {
    EXPECT_EQ(tests::find_other_bits(spec, memory, [&](const attune_attention& a) { plan_and_run(memory, a); }), "")
        << spec.name;
  }
}

}  // namespace
}  // namespace attune::cuda
