// SPDX-License-Identifier: Apache-2.0
// The prefill kernel of GPUs before Hopper in the emulator: prompts over dense keys and caches of 16 bits.
#include "emulated_prefill_mma.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 300;

TEST_F(EmulatedPrefillMma, DenseKeys) {
  check(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "dense", "max_logits": true)",
        {R"("causal": true, "seqlens_q": [150, 0, 3], "seqlens_kv": [150, 5, 300])",
         R"("seqlens_q": [70, 9], "seqlens_kv": [60, 200])", R"("queries": "fixed", "seqlens_q": 70,
             "seqlens_kv": [100, 100], "cu_seqlens_kv": false, "causal": true, "lse": false)",
         R"("causal": true, "seqlens_q": [90], "seqlens_kv": [170], "window": [40, 0], "sinks": "mixed")"});
}

TEST_F(EmulatedPrefillMma, CachesAndNewTokens) {
  check(
      R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "f16", "causal": true, "seqlens_q": [80, 1, 33])",
      {R"("kv": "paged", "seqlens_kv": [200, 300, 40], "cache": {"page_size": 16})",
       R"("kv": "contiguous", "seqlens_kv": [200, 300, 40])",
       R"("kv": "paged", "new_tokens": true, "seqlens_kv": [100, 0, 65], "cache": {"page_size": 64, "layout": "hnd"})"});
}

// What rows do not see has no say, whatever it is.
TEST_F(EmulatedPrefillMma, HiddenValuesThatAreNotFinite) {
  check(R"("heads": [2, 1], "kv": "dense", "causal": true, "seqlens_q": [70, 130], "seqlens_kv": [90, 260])",
        {R"("head_dim": [72, 40], "dtype": "bf16", "plant": "nan_v")",
         R"("head_dim": [64, 64], "dtype": "f16", "plant": "nan_v", "window": [50, 0])"});
}

TEST_F(EmulatedPrefillMma, HeadDims) {
  check(R"("kv": "dense", "causal": true, "seqlens_q": [70], "dtype": "bf16")",
        {R"("heads": [2, 1], "head_dim": [256, 256])"});
}

TEST_F(EmulatedPrefillMma, ScoresAndMasks) {
  check(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "seqlens_q": [90, 20], "seqlens_kv": [90, 100])",
        {R"("kv": "dense", "softcap": 20, "alibi": 1, "causal": true)", R"("kv": "paged", "mask_bits": 1, "bias": 1)",
         R"("kv": "dense", "window": [0, 0], "ranges": [[3, 300], [50, 99]])",
         R"("kv": "dense", "causal": true, "mask_bits": 1, "ranges": [[40, 80], [0, 200]])"});
}

// A launch before writes q, k and v to the workspace, and appends.
TEST_F(EmulatedPrefillMma, Prologues) {
  check(R"("heads": [4, 2], "dtype": "bf16", "causal": true, "seqlens_q": [70, 1, 3], "seqlens_kv": [100, 40, 0])",
        {R"("head_dim": [128, 128], "kv": "paged", "new_tokens": true, "cache": {"page_size": 16},
            "prologue": {"append": true, "v_bias": true, "rope": {"style": "linear", "dim": 64}})",
         R"("head_dim": [128, 64], "kv": "paged", "new_tokens": true, "shared_kv": true,
            "prologue": {"append": true, "k_bias": true, "rope": {"style": "linear", "dim": 32, "offset": 96}})",
         R"("head_dim": [64, 64], "dtype": "f16", "kv": "contiguous", "new_tokens": true,
            "prologue": {"q_bias": true, "k_bias": true, "v_bias": true, "logn": 8, "append": true,
            "rope": {"style": "mrope", "positions": 3, "mrope_section": [8, 12, 12]}})",
         R"("head_dim": [96, 96], "kv": "dense", "seqlens_kv": [70, 1, 3], "cu_seqlens_kv": false, "window": [20, 0],
            "prologue": {"ia3_tasks": 3, "rope": {"style": "linear", "dim": 64}})",
         R"("head_dim": [64, 64], "kv": "paged", "new_tokens": true, "cache": {"dtype": "e4m3", "scales": "token"},
            "prologue": {"append": true, "q_bias": true, "power_of_two_scales": true})"});
}

TEST_F(EmulatedPrefillMma, RowsAtAnyAddress) {
  for (const char* rest :
       {R"("kv": "dense", "cu_seqlens_kv": false, "seqlens_kv": [70, 1, 9])", R"("kv": "dense")",
        R"("kv": "dense", "shared_kv": true)", R"("kv": "dense", "queries": "fixed", "seqlens_q": 20)",
        R"("kv": "paged", "new_tokens": true, "cache": {"page_size": 16})",
        R"("kv": "paged", "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})"}) {
    const cases::Row row = cases::Row(R"("heads": [4, 2], "head_dim": [64, 48], "dtype": "bf16", "causal": true,
        "seqlens_q": [70, 1, 9], "seqlens_kv": [80, 70, 33])")
                               .with(rest);
    EXPECT_EQ(run(tests::make_case(row), "sm_80", false, {}, true), "") << rest;
  }
}

// Warps share Q, K, V and what is said of keys; blocks take several sequences.
TEST_F(EmulatedPrefillMma, HasNoRaces) {
  const emulator::Watched watched;
  const emulator::Shuffled shuffled(7);
  check(R"("heads": [2, 1], "head_dim": [64, 64], "dtype": "bf16", "causal": true, "seqlens_q": [70, 130])",
        {R"("kv": "dense", "seqlens_kv": [90, 260], "plant": "nan_v")",
         R"("kv": "paged", "new_tokens": true, "seqlens_kv": [100, 65], "cache": {"page_size": 16})"},
        true);
}

TEST_F(EmulatedPrefillMma, MatchesTheOracleOnTheTable) {
  check_table(all_cases(kRandomCases), 100, [](const cases::Case& spec) { return run(spec); });
}

}  // namespace
}  // namespace attune::cuda
