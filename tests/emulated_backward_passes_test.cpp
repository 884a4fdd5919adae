// SPDX-License-Identifier: Apache-2.0
// Wide heads in the backward's kernels, on the CPU (tests/emulator): each gradient has a pass of its own.
#include <optional>

#include "emulated_backward.h"

namespace attune::cuda {
namespace {

using tests::EmulatedBackward;

class EmulatedBackwardPasses : public EmulatedBackward {};

// Several blocks of queries and of keys, and one; with one stage of vdo, and two; in each mask and score term.
TEST_F(EmulatedBackwardPasses, OfEveryVariant) {
  const cases::Row row(R"("name": "wide", "heads": [4, 2], "dtype": "bf16", "causal": true, "backward": {"dlse": true},
                          "seqlens_q": [200, 1, 0, 70], "seqlens_kv": [200, 70, 12, 150])");
  for (const char* members :
       {R"("head_dim": [256, 256])", R"("head_dim": [256, 256], "causal": false, "dtype": "f16")",
        R"("head_dim": [192, 192], "window": [70, 0])",
        R"("head_dim": [224, 224], "causal": false, "window": [20, 60])",
        R"("head_dim": [256, 256], "softcap": 2.5, "sinks": "mixed")", R"("head_dim": [256, 64], "sinks": "mixed")",
        R"("head_dim": [232, 240], "alibi": 1, "causal": false)",
        R"("head_dim": [192, 192], "alibi_sqrt": true, "alibi": 2)", R"("head_dim": [200, 136], "mask_bits": 2)",
        R"("head_dim": [256, 256], "mask_bits": 1, "causal": false)",
        R"("head_dim": [256, 256], "queries": "fixed", "seqlens_q": [140, 140], "seqlens_kv": [150, 60])"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
  const cases::Row tables = row.with(R"("backward": {"outputs": ["dq", "dk", "dv"], "dtype": "f32"})");
  for (const char* members : {R"("head_dim": [256, 256], "bias": 2)", R"("head_dim": [192, 192], "t5_buckets": 16)"})
    EXPECT_EQ(check(tests::make_case(tables.with(members))), "") << members;
}

// Of keys that causality and windows hide: before those in sight, behind them, and where nothing else is.
TEST_F(EmulatedBackwardPasses, OfRanges) {
  const cases::Row row(R"("name": "ranges", "heads": [2, 1], "head_dim": [192, 192], "dtype": "bf16", "backward": {},
                          "seqlens_q": [300, 90, 100], "seqlens_kv": [300, 290, 20],
                          "ranges": [[3, 200, 190, 250, 7, 7], [200, 280, 20, 400], [-80, -30, -9, 5, 9, 2]])");
  for (const char* members : {R"("causal": true)", R"("window": [20, 0])", R"("window": [0, 0], "dtype": "f16")",
                              R"("window": [9, 0], "mask_bits": 2)"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// One gradient alone, and two. The planted row lies in a tile of the second block of keys, which does not see it: there
// dk has a NaN to compute again and dv has none.
TEST_F(EmulatedBackwardPasses, OfSomeGradients) {
  const cases::Row row(R"("name": "some", "heads": [2, 1], "head_dim": [192, 136], "dtype": "bf16", "causal": true,
                          "seqlens_q": [150], "seqlens_kv": [200])");
  for (const cases::Row& some : tests::some_gradients(row, {"", "nan_q", "inf_dout"}))
    EXPECT_EQ(check(tests::make_case(some)), "") << some.text();
}

// A NaN reaches only what sees it: whichever pass has met it, rows of all of them are computed again.
TEST_F(EmulatedBackwardPasses, BesideNan) {
  const cases::Row row(R"("name": "nan", "heads": [2, 1], "head_dim": [256, 256], "dtype": "bf16", "causal": true,
                          "seqlens_q": [150, 40], "seqlens_kv": [150, 70], "backward": {})");
  for (const char* members : {R"("plant": "nan_v")", R"("backward": {"plant": "nan_q"})",
                              R"("backward": {"plant": "inf_dout"})", R"("backward": {"plant": "no_lse"})"})
    EXPECT_EQ(check(tests::make_case(row.with(members))), "") << members;
}

// Whatever the order of blocks, warps and lanes.
TEST_F(EmulatedBackwardPasses, HaveTheSameBits) {
  cases::BackwardProblem problem(
      tests::make_case(R"({"name": "bits", "heads": [4, 2], "head_dim": [256, 256], "dtype": "bf16", "causal": true,
          "seqlens_q": [150, 131, 5], "seqlens_kv": [150, 131, 70], "backward": {}})"));
  std::vector<std::vector<std::byte>> first;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    std::optional<emulator::Shuffled> shuffled;
    if (seed > 0) shuffled.emplace(seed);
    ASSERT_EQ(run_emulated(problem.host()), "");
    std::vector<std::vector<std::byte>> bits;
    for (const attune_tensor& t : {problem.host().op.dq, problem.host().op.dk, problem.host().op.dv})
      bits.push_back(tests::gather(t));
    if (seed == 0) first = bits;
    EXPECT_TRUE(bits == first) << seed;
  }
}

// A neighbour's keys lie in the last tile of keys. Rows that are computed again have other bits.
TEST_F(EmulatedBackwardPasses, DqHasItsBitsBesideNan) {
  cases::BackwardProblem problem(
      tests::make_case(R"({"name": "beside", "heads": [2, 1], "head_dim": [200, 136], "dtype": "bf16", "poison": false,
          "seqlens_q": [100, 30], "seqlens_kv": [70, 30], "backward": {}})"));
  const auto dq = [&] {
    EXPECT_EQ(run_emulated(problem.host()), "");
    return tests::gather(tests::rows_of(problem.host().op.dq, 0, 100));
  };
  const auto alone = dq();
  cases::for_each_element(tests::rows_of(problem.host().attention.k, 70, 30),
                          [](const int64_t*, void* x) { std::memset(x, 0xff, 2); });
  EXPECT_TRUE(alone == dq());
}

// No workspace but for stats, lists and flags.
TEST_F(EmulatedBackwardPasses, HaveNoSums) {
  cases::BackwardProblem problem(
      tests::make_case(R"({"name": "room", "heads": [4, 2], "head_dim": [256, 256], "dtype": "bf16", "queries": "fixed",
          "seqlens_q": [1000], "seqlens_kv": [1000], "backward": {}, "poison": false})"));
  cases::BackwardCall call = problem.host();
  const attune::BackwardProblem p = make_backward(*call.linked(), call.attention, Data::kOptional);
  EXPECT_LT(backward::choose_config(p).workspace_bytes(), 64u * 1024);
}

}  // namespace
}  // namespace attune::cuda
