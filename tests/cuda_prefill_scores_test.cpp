// SPDX-License-Identifier: Apache-2.0
// Scores that something is done to, over several tiles, by the prefill kernel on a GPU, against the oracle. Skipped,
// with the reason, where there is none.
#include <string>

#include "cuda_prefill_cases.h"

namespace attune::cuda {
namespace {

class CudaPrefillScores : public CudaCases {};

// Scores that stay where the short polynomial holds, that leave it after some tiles, and that saturate; alone, and with
// what else a kernel is compiled for.
std::vector<cases::Case> capped_cases() {
  std::vector<cases::Case> list;
  int number = 0;
  const cases::Row common(R"("heads": [6, 2], "causal": true, "seqlens_q": [300, 1, 129, 0, 17],
      "seqlens_kv": [1300, 260, 900, 20, 600])");
  for (const char* dims : {R"("head_dim": [128, 128], "dtype": "bf16")", R"("head_dim": [64, 64], "dtype": "f16")"}) {
    for (const char* kv : {R"("kv": "dense")", R"("kv": "paged", "cache": {"page_size": 16}, "new_tokens": true)"}) {
      for (const char* rest :
           {R"("softcap": 30)", R"("softcap": 50, "max_logits": true)", R"("softcap": 30, "softmax_scale": 0.3)",
            R"("softcap": 50, "softmax_scale": 0.6, "window": [400, 0])", R"("softcap": 20, "data": "spread")",
            R"("softcap": 5)", R"("softcap": 2, "alibi": 1)", R"("softcap": 30, "sinks": "mixed", "plant": "nan_v")"}) {
        list.push_back(tests::make_case(common.set("name", cat("capped ", number++)).with(dims).with(kv).with(rest)));
      }
    }
  }
  return list;
}

TEST_F(CudaPrefillScores, CappedOverManyTiles) { check_all_of(capped_cases(), ByPrefill()); }

TEST(CudaPrefillScoresConfig, TakesCappedCases) {
  for (const cases::Case& spec : capped_cases()) {
    cases::Problem problem(spec);
    EXPECT_TRUE(ByPrefill::takes(problem.host(), make_problem(problem.host(), Data::kRequired))) << spec.name;
  }
}

}  // namespace
}  // namespace attune::cuda
