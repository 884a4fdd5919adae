// SPDX-License-Identifier: Apache-2.0
// With batch_invariant a sequence has the same bits alone and in any batch, on the CPU. On a GPU:
// cuda_batch_invariant_test.cpp; the CUDA kernels on the CPU: emulated_batch_invariant_test.cpp.
#include "batch_of.h"

namespace attune::tests {
namespace {

TEST(BatchInvariant, EachSequenceHasTheSameBitsInAnyBatch) {
  for (const cases::Case& spec : batch_invariant_cases())
    EXPECT_EQ(find_other_bits(spec, cases::host_memory(), plan_and_run), "") << spec.name;
}

// In other dtypes.
TEST(BatchInvariant, EachSequenceHasTheSameBitsInAnyDtype) {
  for (const cases::Case& spec : cases::parse_cases(R"({"area": "batch", "cases": [
      {"name": "dtypes", "heads": [4, 2], "causal": true, "batch_invariant": true, "max_seqlens": true,
       "sweep": {"dtype": ["f32", "f16", "bf16"], "with": [
         {"name": "dense", "seqlens_q": [40, 1, 9], "seqlens_kv": [40, 30, 100]},
         {"name": "decode", "kv": "paged", "seqlens_kv": [1700, 3, 65]},
         {"name": "chunks", "kv": "paged", "new_tokens": true, "seqlens_q": [40, 1, 9],
          "seqlens_kv": [30, 200, 0]}]}}]})"))
    EXPECT_EQ(find_other_bits(spec, cases::host_memory(), plan_and_run), "") << spec.name;
}

}  // namespace
}  // namespace attune::tests
