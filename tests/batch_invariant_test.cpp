// SPDX-License-Identifier: Apache-2.0
// With batch_invariant a sequence has the same bits alone and in any batch, on the CPU. On a GPU:
// cuda_batch_invariant_test.cpp; the CUDA kernels on the CPU: emulated_batch_invariant_test.cpp.
#include "batch_of.h"
#include "cases/sanitizer.h"

namespace attune::tests {
namespace {

// Of each sequence in the largest batch; sanitizers look at addresses, which a smaller one has as well.
constexpr int64_t kMostOfEach = cases::kAddressSanitizer ? 2 : 7;

// A share of the cases each: under sanitizers all of them take minutes.
constexpr size_t kShares = 6;
class BatchInvariant : public testing::TestWithParam<size_t> {};

TEST_P(BatchInvariant, EachSequenceHasTheSameBitsInAnyBatch) {
  const std::vector<cases::Case> all = batch_invariant_cases();
  ASSERT_GE(all.size(), kShares);
  for (size_t i = GetParam(); i < all.size(); i += kShares)
    EXPECT_EQ(find_other_bits(all[i], cases::host_memory(), plan_and_run, kMostOfEach), "") << all[i].name;
}

INSTANTIATE_TEST_SUITE_P(Shares, BatchInvariant, testing::Range(size_t{0}, kShares));

// In other dtypes.
TEST(BatchInvariantDtypes, EachSequenceHasTheSameBitsInAnyBatch) {
  for (const cases::Case& spec : cases::parse_cases(R"({"area": "batch", "cases": [
      {"name": "dtypes", "heads": [4, 2], "causal": true, "batch_invariant": true, "max_seqlens": true,
       "sweep": {"dtype": ["f32", "f16", "bf16"], "with": [
         {"name": "dense", "seqlens_q": [40, 1, 9], "seqlens_kv": [40, 30, 100]},
         {"name": "decode", "kv": "paged", "seqlens_kv": [1700, 3, 65]},
         {"name": "chunks", "kv": "paged", "new_tokens": true, "seqlens_q": [40, 1, 9],
          "seqlens_kv": [30, 200, 0]}]}}]})"))
    EXPECT_EQ(find_other_bits(spec, cases::host_memory(), plan_and_run, kMostOfEach), "") << spec.name;
}

}  // namespace
}  // namespace attune::tests
