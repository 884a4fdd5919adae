// SPDX-License-Identifier: Apache-2.0
// What nobody may see changes no bit, on a GPU, whatever kernel a call gets. Skipped, with the reason, where there is
// none. ATTUNE_CASE=<part of a name> leaves only cases that contain it.
#include "cuda_run.h"
#include "unseen.h"

namespace attune::cuda {
namespace {

class CudaUnseen : public CudaCases {};

TEST_F(CudaUnseen, ChangesNoBits) {
  cases::CudaMemory memory(kDevice);
  std::vector<cases::Case> list = tests::unseen_cases();
  tests::keep_picked(list);
  warm_calls(memory, list);
  for (const cases::Case& spec : list) {
    EXPECT_EQ(tests::find_bits_of_unseen(spec, memory, [&](const attune_attention& a) { plan_and_run(memory, a); }), "")
        << spec.name;
  }
}

}  // namespace
}  // namespace attune::cuda
