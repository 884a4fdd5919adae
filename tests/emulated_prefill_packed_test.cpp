// SPDX-License-Identifier: Apache-2.0
// Prefill over x-packed caches, in the emulator.
#include "emulated_prefill.h"

namespace attune::cuda {
namespace {

TEST_F(EmulatedPrefill, PackedCaches) {
  const cases::Row common(R"("heads": [6, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [40, 1, 70], "seqlens_kv": [40, 261, 201], "max_logits": true)");
  for (const char* rest :
       {R"("cache": {"layout": "xpacked", "page_size": 16})", R"("cache": {"layout": "xpacked", "page_size": 32})",
        R"("cache": {"layout": "xpacked", "page_size": 48}, "dtype": "f16")",
        R"("cache": {"layout": "xpacked", "page_size": 16}, "window": [20, 0])",
        R"("cache": {"layout": "xpacked", "page_size": 16}, "head_dim": [64, 40], "dtype": "f16")",
        R"("cache": {"layout": "xpacked", "page_size": 32}, "head_dim": [40, 96])"}) {
    for (const bool new_tokens : {false, true}) {
      EXPECT_EQ(run(tests::make_case(common.set("new_tokens", new_tokens).with(rest))), "")
          << rest << ", new tokens " << new_tokens;
    }
  }
}

// Everything else that a call over x-packed pages may ask for.
TEST_F(EmulatedPrefill, PackedCachesWithAllElse) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "seqlens_q": [70, 9], "seqlens_kv": [200, 60])");
  for (const char* rest :
       {R"("causal": true, "mask_bits": 2)", R"("causal": true, "ranges": [[5, 150], [0, 9, 20, 40]])", R"("bias": 2)",
        R"("t5_buckets": 32, "t5_max_distance": 128, "t5_bidirectional": true)",
        R"("window": [50, 7], "sinks": "normal")", R"("causal": true, "softcap": 20, "data": "spread")",
        R"("causal": true, "alibi": 1, "max_logits": true)",
        R"("causal": true, "alibi": 1, "alibi_sqrt": true, "softcap": 30)", R"("softmax_scale": -0.1)",
        R"("causal": true, "plant": "nan_v")", R"("causal": true, "plant": "nan_k")",
        R"("causal": true, "plant": "inf_v")", R"("out_dtype": "f32", "finished": [0, 1], "zero_finished": true)",
        R"("head_dim": [256, 256], "causal": true)", R"("head_dim": [256, 256], "causal": true, "new_tokens": true)",
        R"("causal": true, "alibi": 1, "new_tokens": true)", R"("mask_bits": 1, "new_tokens": true)",
        R"("head_dim": [192, 128], "dtype": "f16")",

        R"("seqlens_q": [1, 2], "seqlens_kv": [2900, 300], "heads": [48, 1], "head_dim": [64, 64], "causal": true)"}) {
    for (const char* cache : {R"("cache": {"layout": "xpacked", "page_size": 16, "separate_v_table": true})",
                              R"("cache": {"layout": "xpacked", "page_size": 32})"}) {
      EXPECT_EQ(run(tests::make_case(common.with(cache).with(rest))), "") << rest << ", " << cache;
    }
  }
}

// 8-bit x-packed pages, with every kind of scale, and masks that end at every place in a page.
TEST_F(EmulatedPrefill, PackedCachesOfEightBits) {
  const cases::Row common(R"("heads": [6, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [40, 1, 70], "seqlens_kv": [40, 261, 203], "max_logits": true)");
  for (const char* rest :
       {R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "tensor", "page_size": 16})",
        R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "head", "page_size": 32}, "dtype": "f16")",
        R"("cache": {"layout": "xpacked", "dtype": "e5m2", "scales": "none", "page_size": 48})",
        R"("cache": {"layout": "xpacked", "dtype": "i8", "scales": "token", "page_size": 16})",
        R"("cache": {"layout": "xpacked", "dtype": "i8", "scales": "token", "page_size": 256}, "dtype": "f16")",
        R"("cache": {"layout": "xpacked", "dtype": "e5m2", "scales": "tensor", "page_size": 16}, "dtype": "f16",
           "head_dim": [80, 48])",
        R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "head", "page_size": 16}, "head_dim": [16, 112])",
        R"("cache": {"layout": "xpacked", "dtype": "i8", "scales": "head", "page_size": 352}, "head_dim": [64, 64])",
        R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "head", "page_size": 64},
           "head_dim": [192, 128])",
        R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "head", "page_size": 16},
           "window": [37, 0])"}) {
    for (const bool new_tokens : {false, true}) {
      EXPECT_EQ(run(tests::make_case(common.set("new_tokens", new_tokens).with(rest))), "")
          << rest << ", new tokens " << new_tokens;
    }
  }
}

// What nobody may see is NaN here, and must be zeroed before it is multiplied.
TEST_F(EmulatedPrefill, ClearsWhatNobodySees) {
  const cases::Row common(R"("heads": [6, 2], "head_dim": [128, 80], "dtype": "bf16", "kv": "paged", "causal": true,
      "window": [100, 0], "seqlens_q": [40, 17], "seqlens_kv": [261, 203])");
  for (const char* cache : {R"("cache": {"page_size": 16})", R"("cache": {"page_size": 16, "layout": "xpacked"})",
                            R"("cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})",
                            R"("cache": {"page_size": 32, "dtype": "e5m2", "scales": "token", "layout": "xpacked"})"}) {
    EXPECT_EQ(run(tests::make_case(common.with(cache)), 1, {}, Twist::kRecomputeFails), "") << cache;
  }
}

TEST_F(EmulatedPrefill, PackedCachesOfEightBitsWithAllElse) {
  int number = 0;
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged",
      "seqlens_q": [70, 9], "seqlens_kv": [200, 60])");
  for (const char* rest :
       {R"("causal": true, "mask_bits": 2)", R"("causal": true, "ranges": [[5, 150], [0, 9, 20, 40]])", R"("bias": 2)",
        R"("window": [50, 7], "sinks": "normal")", R"("causal": true, "softcap": 20, "data": "spread")",
        R"("causal": true, "alibi": 1, "new_tokens": true)", R"("softmax_scale": -0.1, "new_tokens": true)",
        R"("causal": true, "plant": "nan_v")", R"("causal": true, "plant": "nan_k", "new_tokens": true)",
        R"("causal": true, "data": "far", "new_tokens": true)", R"("head_dim": [256, 256], "causal": true)",
        R"("head_dim": [256, 192], "causal": true, "new_tokens": true)",
        R"("seqlens_q": [1, 2], "seqlens_kv": [2900, 300], "heads": [48, 1], "head_dim": [64, 64], "causal": true)",
        R"("new_tokens": true, "causal": true, "prologue": {"append": true, "v_bias": true,
            "rope": {"style": "linear", "dim": 64}})"}) {
    static constexpr const char* kCaches[] = {
        R"("cache": {"layout": "xpacked", "dtype": "e4m3", "scales": "tensor", "page_size": 16, "separate_v_table": true})",
        R"("cache": {"layout": "xpacked", "dtype": "i8", "scales": "token", "page_size": 48})"};
    const char* const cache = kCaches[number++ % 2];
    EXPECT_EQ(run(tests::make_case(common.with(cache).with(rest))), "") << rest << ", " << cache;
  }
}

}  // namespace
}  // namespace attune::cuda
