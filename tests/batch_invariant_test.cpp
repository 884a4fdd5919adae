// SPDX-License-Identifier: Apache-2.0
// With batch_invariant a sequence has the same bits alone and in any batch, on the CPU. On a GPU:
// cuda_batch_invariant_test.cpp; the CUDA kernels on the CPU: emulated_batch_invariant_test.cpp.
#include <cctype>

#include "batch_of.h"

namespace attune::tests {
namespace {

// Of each sequence in the largest batch; sanitizers look at addresses, which a smaller one has as well.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kMostOfEach = 2;
#else
constexpr int64_t kMostOfEach = 7;
#endif

// One test a case: under sanitizers all of them take minutes.
class BatchInvariant : public testing::TestWithParam<size_t> {};

TEST_P(BatchInvariant, EachSequenceHasTheSameBitsInAnyBatch) {
  const cases::Case spec = batch_invariant_cases()[GetParam()];
  EXPECT_EQ(find_other_bits(spec, cases::host_memory(), plan_and_run, kMostOfEach), "") << spec.name;
}

INSTANTIATE_TEST_SUITE_P(Cases, BatchInvariant, testing::Range(size_t{0}, batch_invariant_cases().size()),
                         [](const auto& info) {
                           std::string name = batch_invariant_cases()[info.param].name;
                           for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
                           return name;
                         });

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
