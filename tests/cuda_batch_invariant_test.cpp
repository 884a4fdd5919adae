// SPDX-License-Identifier: Apache-2.0
// With batch_invariant a sequence has the same bits alone and in any batch, on a GPU, whatever kernel a call gets.
// Skipped, with the reason, where there is none.
#include "batch_of.h"
#include "cuda_run.h"

namespace attune::cuda {
namespace {

class CudaBatchInvariant : public CudaCases {};

TEST_F(CudaBatchInvariant, EachSequenceHasTheSameBitsInAnyBatch) {
  cases::CudaMemory memory(kDevice);
  std::vector<cases::Case> list = tests::batch_invariant_cases();
  tests::keep_picked(list);
  warm_calls(memory, list);
  for (const cases::Case& spec : list) {
    EXPECT_EQ(tests::find_other_bits(spec, memory, [&](const attune_attention& a) { plan_and_run(memory, a); }), "")
        << spec.name;
  }
}

}  // namespace
}  // namespace attune::cuda
