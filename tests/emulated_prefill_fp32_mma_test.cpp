// SPDX-License-Identifier: Apache-2.0
// The prefill kernel of fp32 rows on GPUs before Hopper in the emulator.
#include <limits>

#include "emulated_prefill_mma.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 300;

class EmulatedPrefillFp32Mma : public EmulatedPrefillMma {
 protected:
  // GPUs differ in the shapes of blocks for head dims above 128 alone.
  static void check(const cases::Row& common, std::initializer_list<const char*> rest, bool few_blocks = false,
                    const Edit& edit = {}) {
    for (const char* more : rest)
      EXPECT_EQ(run(tests::make_case(common.with(more)), "sm_80", few_blocks, edit), "") << common.with(more).text();
  }
  static void check(std::string_view common, std::initializer_list<const char*> rest, bool few_blocks = false,
                    const Edit& edit = {}) {
    check(cases::Row(common), rest, few_blocks, edit);
  }
};

TEST_F(EmulatedPrefillFp32Mma, DenseKeys) {
  check(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "f32", "kv": "dense", "max_logits": true)",
        {R"("causal": true, "seqlens_q": [150, 0, 3], "seqlens_kv": [150, 5, 300])",
         R"("seqlens_q": [70, 9], "seqlens_kv": [60, 200], "strides": "odd")", R"("queries": "fixed", "seqlens_q": 70,
             "seqlens_kv": [100, 100], "cu_seqlens_kv": false, "causal": true, "lse": false)",
         R"("causal": true, "seqlens_q": [90], "seqlens_kv": [170], "window": [40, 0], "sinks": "mixed")",
         R"("causal": true, "seqlens_q": [90], "softmax_scale": -0.1)", R"("shared_kv": true, "seqlens_q": [40])"});
}

// Rows that end anywhere.
TEST_F(EmulatedPrefillFp32Mma, HeadDims) {
  for (const char* dims :
       {R"("head_dim": [64, 64])", R"("head_dim": [1, 3])", R"("head_dim": [99, 37])",
        R"("head_dim": [250, 20], "out_dtype": "bf16")", R"("head_dim": [40, 6], "out_dtype": "f16")"})
    check(cases::Row(R"("heads": [2, 1], "dtype": "f32", "causal": true, "seqlens_q": [70, 3])").with(dims),
          {R"("kv": "dense", "seqlens_kv": [110, 40])"});
}

// Shapes of blocks.
TEST_F(EmulatedPrefillFp32Mma, WideHeadDims) {
  for (const char* dims : {R"("head_dim": [192, 128])", R"("head_dim": [128, 256])", R"("head_dim": [256, 256])"}) {
    for (const char* like : {"sm_80", "sm_86"})
      EXPECT_EQ(run(tests::make_case(cases::Row(R"("heads": [2, 1], "dtype": "f32", "causal": true, "kv": "paged",
          "seqlens_q": [70, 3], "seqlens_kv": [90, 40])")
                                         .with(dims)),
                    like),
                "")
          << dims << " " << like;
  }
}

// Every format and layout of a cache, at any address.
TEST_F(EmulatedPrefillFp32Mma, Caches) {
  check(
      R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "f32", "causal": true, "seqlens_q": [80, 1, 33],
           "seqlens_kv": [200, 300, 40], "kv": "paged")",
      {R"("cache": {"page_size": 16})", R"("kv": "contiguous")",
       R"("new_tokens": true, "seqlens_kv": [100, 0, 65], "cache": {"page_size": 24, "layout": "hnd"})",
       R"("cache": {"page_size": 32, "layout": "xpacked"})",
       R"("cache": {"page_size": 6, "dtype": "bf16", "layout": "xpacked"})",
       R"("new_tokens": true, "cache": {"page_size": 8, "dtype": "f16", "row_padding": 1})",
       R"("cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})",
       R"("new_tokens": true, "cache": {"page_size": 5, "dtype": "i8", "scales": "token", "layout": "xpacked", "x": 8})",
       R"("cache": {"page_size": 16, "dtype": "e5m2", "scales": "tensor"}, "head_dim": [24, 40])"});
}

TEST_F(EmulatedPrefillFp32Mma, ScoresAndMasks) {
  check(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "f32", "seqlens_q": [90, 20], "seqlens_kv": [90, 100])",
        {R"("kv": "dense", "softcap": 20, "alibi": 1, "causal": true)", R"("kv": "paged", "mask_bits": 1, "bias": 1)",
         R"("kv": "dense", "window": [0, 0], "ranges": [[3, 300], [50, 99]])",
         R"("kv": "dense", "causal": true, "mask_bits": 1, "ranges": [[40, 80], [0, 200]])",
         R"("kv": "dense", "t5_buckets": 32, "finished": [0, 1], "zero_finished": true)"});
}

TEST_F(EmulatedPrefillFp32Mma, Prologues) {
  check(R"("heads": [4, 2], "dtype": "f32", "causal": true, "seqlens_q": [70, 1, 3], "seqlens_kv": [100, 40, 0])",
        {R"("head_dim": [128, 128], "kv": "paged", "new_tokens": true, "cache": {"page_size": 16},
            "prologue": {"append": true, "v_bias": true, "rope": {"style": "linear", "dim": 64}})",
         R"("head_dim": [72, 72], "kv": "dense", "seqlens_kv": [70, 1, 3], "cu_seqlens_kv": false,
            "prologue": {"q_bias": true, "logn": 8, "rope": {"style": "linear", "dim": 64}})"});
}

// As prefill_mma.cu does not take them: odd head dims, elements and layouts.
TEST_F(EmulatedPrefillFp32Mma, SixteenBitsAsFloats) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "bf16", "causal": true, "seqlens_q": [70, 0, 9],
      "seqlens_kv": [200, 60, 9])");
  for (const char* rest :
       {R"("kv": "dense", "head_dim": [100, 36])", R"("kv": "dense", "head_dim": [64, 64], "strides": "odd")",
        R"("kv": "paged", "head_dim": [100, 100], "new_tokens": true, "cache": {"page_size": 16})",
        R"("kv": "paged", "head_dim": [24, 24], "dtype": "f16", "new_tokens": true,
           "cache": {"page_size": 32, "dtype": "e4m3", "scales": "tensor", "layout": "xpacked", "x": 8})",
        R"("kv": "paged", "head_dim": [40, 40], "new_tokens": true, "cache": {"page_size": 32, "dtype": "i8",
           "scales": "token"}, "prologue": {"append": true, "v_bias": true, "rope": {"style": "linear", "dim": 32}})",
        R"("kv": "paged", "head_dim": [64, 64], "cache": {"page_size": 24, "dtype": "f16"}, "out_dtype": "e4m3")"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), "sm_80", false, {}, false, attention::Rows::kFp32), "") << rest;
  }
}

// What rows do not see has no say, whatever it is; what they see is computed key by key.
TEST_F(EmulatedPrefillFp32Mma, NumbersThatAreNotFinite) {
  check(R"("heads": [2, 1], "causal": true, "dtype": "f32", "seqlens_q": [70, 130], "seqlens_kv": [90, 260])",
        {R"("kv": "dense", "head_dim": [72, 40], "plant": "nan_v")",
         R"("kv": "dense", "head_dim": [64, 64], "plant": "nan_v", "window": [50, 0])",
         R"("kv": "dense", "head_dim": [64, 64], "plant": "nan_k")",
         R"("kv": "paged", "head_dim": [64, 64], "plant": "nan_v", "cache": {"page_size": 16})",
         R"("kv": "paged", "head_dim": [64, 64], "plant": "nan_v", "cache": {"page_size": 16, "dtype": "e4m3",
            "scales": "token"}, "max_logits": true)"});
}

// bf16 rounds them to infinity, and infinities have no parts.
TEST_F(EmulatedPrefillFp32Mma, LargestNumbers) {
  const cases::Row common(R"("heads": [2, 1], "causal": true, "dtype": "f32", "seqlens_q": [70], "seqlens_kv": [90],
      "kv": "dense", "head_dim": [64, 64])");
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float x : {3.4e38f, infinity, -infinity}) {
    for (const bool values : {false, true}) {
      EXPECT_EQ(run(tests::make_case(common), "sm_80", false,
                    [&](const attune_attention& a) {
                      tests::multiply(a.q, 0x1p-10f);  // products stay within fp32
                      cases::encode(ATTUNE_FLOAT32, x, cases::element_at(values ? a.v : a.k, {50, 0, 5}));
                    }),
                "")
          << x << (values ? " in v" : " in k");
    }
  }
}

TEST_F(EmulatedPrefillFp32Mma, BadPages) {
  for (const char* cache : {R"("cache": {"page_size": 16, "separate_v_table": true})",
                            R"("cache": {"page_size": 5, "dtype": "i8", "scales": "token", "separate_v_table": true})"})
    check(cases::Row(R"("heads": [2, 1], "head_dim": [64, 64], "dtype": "f32", "kv": "paged", "causal": true,
        "seqlens_q": [70, 3], "seqlens_kv": [300, 150], "plant": "nan_v")")
              .with(cache),
          {R"("new_tokens": true)", R"("new_tokens": false)"}, false, tests::spoil_pages);
}

// What only the device knows is clamped.
TEST_F(EmulatedPrefillFp32Mma, SpoiltLengths) {
  check(R"("heads": [2, 1], "head_dim": [64, 64], "dtype": "f32", "causal": true, "seqlens_q": [70, 1, 3])",
        {R"("kv": "paged", "new_tokens": true, "seqlens_kv": [200, 60, 60])",
         R"("kv": "paged", "seqlens_kv": [200, 60, 60])"},
        false, [](const attune_attention& a) {
          tests::set_entry(a.seqused_kv, {0}, INT32_MAX), tests::set_entry(a.seqused_kv, {1}, INT32_MIN);
          tests::set_entry(a.cu_seqlens_q, {0}, -7), tests::set_entry(a.cu_seqlens_q, {3}, INT32_MAX);
        });
}

// Warps share Q, K and V; blocks take several sequences.
TEST_F(EmulatedPrefillFp32Mma, HasNoRaces) {
  const emulator::Watched watched;
  const emulator::Shuffled shuffled(7);
  check(R"("heads": [2, 1], "dtype": "f32", "causal": true, "seqlens_q": [70, 130])",
        {R"("kv": "dense", "head_dim": [64, 64], "seqlens_kv": [90, 160], "plant": "nan_v")",
         R"("kv": "paged", "head_dim": [136, 64], "new_tokens": true, "seqlens_kv": [60, 65],
            "cache": {"page_size": 16})"},
        true);
}

TEST_F(EmulatedPrefillFp32Mma, MatchesTheOracleOnTheTable) {
  std::vector<cases::Case> list = all_cases(kRandomCases);
  std::erase_if(list, [](const cases::Case& c) { return c.dtype != ATTUNE_FLOAT32; });
  check_table(list, 100, [](const cases::Case& spec) { return run(spec); });
}

}  // namespace
}  // namespace attune::cuda
