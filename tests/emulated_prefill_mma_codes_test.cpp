// SPDX-License-Identifier: Apache-2.0
// The prefill kernel of GPUs before Hopper in the emulator, over 8-bit caches.
#include <limits>

#include "emulated_prefill_mma.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

class EmulatedPrefillMmaCodes : public EmulatedPrefillMma {
 protected:
  static constexpr const char* kArchitectures[] = {"sm_80", "sm_86", "sm_89"};

  static void check_as_all(const cases::Row& row, const Edit& edit = {}, bool few_blocks = false) {
    for (const char* like : kArchitectures)
      EXPECT_EQ(run(tests::make_case(row), like, few_blocks, edit), "") << row.text() << " " << like;
  }
};

TEST_F(EmulatedPrefillMmaCodes, FormatsAndScales) {
  const cases::Row common(R"("heads": [2, 1], "head_dim": [128, 128], "kv": "paged", "causal": true,
      "seqlens_q": [70, 1, 3], "seqlens_kv": [130, 160, 70], "max_logits": true, "cache": {"page_size": 16})");
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* cache : {"e4m3", "e5m2", "i8"}) {
      for (const char* scales : {"none", "tensor", "head", "token"}) {
        if (cache == std::string("i8") && scales == std::string("none")) continue;
        const cases::Row row = common.set("dtype", dtype).set("cache.dtype", cache).set("cache.scales", scales);
        if (scales == std::string("none") || scales == std::string("tensor")) {
          EXPECT_EQ(run(tests::make_case(row)), "") << row.text();
        } else {
          check_as_all(row);
        }
      }
    }
  }
}

// e4m3 queries, keys and values: bf16 rows by a launch before, with their scales.
TEST_F(EmulatedPrefillMmaCodes, DenseCodes) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "e4m3", "out_dtype": "bf16",
      "kv": "dense", "seqlens_q": [150, 0, 70], "seqlens_kv": [150, 5, 300])");
  for (const char* rest :
       {R"("causal": true, "max_logits": true)", R"("causal": true, "prologue": {"qkv_scale": true})",
        R"("out_dtype": "f32", "seqlens_kv": [129, 3, 257], "prologue": {"qkv_scale": true})",
        R"("window": [20, 7], "sinks": "normal", "out_dtype": "f16")", R"("strides": "odd", "causal": true)",
        R"("seqlens_kv": [150, 0, 70], "cu_seqlens_kv": false, "prologue": {"qkv_scale": true})",
        R"("queries": "fixed", "seqlens_q": 70, "prologue": {"qkv_scale": true}, "head_dim": [64, 256])",
        R"("causal": true, "softcap": 20, "mask_bits": 1)", R"("shared_kv": true, "plant": "nan_k")"})
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
}

// Tiles of codes, then of 16-bit rows.
TEST_F(EmulatedPrefillMmaCodes, NewTokens) {
  for (const char* cache : {R"("cache": {"dtype": "e4m3", "scales": "head", "page_size": 64})",
                            R"("cache": {"dtype": "i8", "scales": "token", "page_size": 128, "layout": "hnd"})"}) {
    for (const char* dtype : {"bf16", "f16"}) {
      check_as_all(
          cases::Row(R"("heads": [2, 1], "head_dim": [64, 64], "kv": "paged", "new_tokens": true, "causal": true,
          "seqlens_q": [150, 40, 70, 3], "seqlens_kv": [200, 0, 64, 100])")
              .with(cache)
              .set("dtype", dtype));
      // Its last rows see no key of the cache.
      check_as_all(cases::Row(R"("heads": [2, 1], "head_dim": [64, 64], "kv": "contiguous", "new_tokens": true,
          "causal": true, "window": [30, 0], "seqlens_q": [100], "seqlens_kv": [90])")
                       .with(cache)
                       .set("dtype", dtype));
    }
  }
}

TEST_F(EmulatedPrefillMmaCodes, HeadDims) {
  for (const char* dims : {R"("head_dim": [256, 256])", R"("head_dim": [192, 128])", R"("head_dim": [96, 48])",
                           R"("head_dim": [256, 208])", R"("head_dim": [32, 16])"}) {
    for (const char* scales : {"head", "token"}) {
      check_as_all(cases::Row(R"("heads": [1, 1], "kv": "paged", "causal": true, "seqlens_q": [70],
          "seqlens_kv": [150], "dtype": "bf16", "cache": {"dtype": "i8", "page_size": 16})")
                       .with(dims)
                       .set("cache.scales", scales));
    }
  }
}

TEST_F(EmulatedPrefillMmaCodes, ScoresAndMasks) {
  for (const char* rest : {R"("softcap": 20, "alibi": 1, "causal": true)", R"("mask_bits": 1, "bias": 1)",
                           R"("causal": true, "ranges": [[3, 200], [50, 99]])",
                           R"("causal": true, "sinks": "mixed", "window": [40, 0])"}) {
    for (const char* scales : {"head", "token"}) {
      check_as_all(cases::Row(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged",
          "seqlens_q": [90, 20], "seqlens_kv": [170, 100], "cache": {"dtype": "e4m3", "page_size": 16})")
                       .with(rest)
                       .set("cache.scales", scales));
    }
  }
}

// Whatever the scales are, no number of K or V is rounded: these leave fp16's range when scaled.
TEST_F(EmulatedPrefillMmaCodes, ScalesBeyondFp16) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "f16", "out_dtype": "f32", "kv": "paged",
      "causal": true, "seqlens_q": [70, 9], "seqlens_kv": [90, 260], "max_logits": true)");
  for (const char* scales : {"head", "token"}) {
    for (const bool new_tokens : {false, true}) {
      for (const float times : {0x1p20f, -0x1p-40f}) {
        check_as_all(common.set("new_tokens", new_tokens)
                         .with(R"("cache": {"dtype": "e4m3", "page_size": 16})")
                         .set("cache.scales", scales),
                     [&](const attune_attention& a) {
                       tests::multiply(a.cache.v_scale, times);
                       tests::multiply(a.cache.k_scale, times > 0 ? -1.0f : 0.5f);
                     });
      }
    }
  }
}

// What rows do not see has no say, whatever it is: codes, or scales.
TEST_F(EmulatedPrefillMmaCodes, HiddenValuesThatAreNotFinite) {
  const cases::Row common(R"("heads": [2, 1], "kv": "paged", "causal": true, "seqlens_q": [70, 130],
      "seqlens_kv": [90, 260], "head_dim": [64, 64])");
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* scales : {"head", "token"})
      check_as_all(common.set("dtype", dtype)
                       .with(R"("plant": "nan_v", "cache": {"dtype": "e4m3", "page_size": 16})")
                       .set("cache.scales", scales));
    for (const float odd : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
      check_as_all(common.set("dtype", dtype).with(R"("cache": {"dtype": "i8", "scales": "token", "page_size": 16})"),
                   [&](const attune_attention& a) {
                     for (const auto& [sequence, key] : {std::pair<int64_t, int64_t>{0, 60}, {1, 200}, {1, 3}}) {
                       const int64_t page = tests::entry(a.cache.page_table, {sequence, key / 16});
                       cases::encode(ATTUNE_FLOAT32, odd, cases::element_at(a.cache.v_scale, {page, key % 16, 0}));
                     }
                   });
    }
  }
}

// Scales of all keys of a head: some rows see new tokens alone.
TEST_F(EmulatedPrefillMmaCodes, OddScalesOfHeads) {
  for (const float odd : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    check_as_all(cases::Row(R"("heads": [4, 2], "head_dim": [64, 64], "kv": "contiguous", "new_tokens": true,
        "causal": true, "window": [30, 0], "seqlens_q": [100], "seqlens_kv": [90], "dtype": "bf16",
        "cache": {"dtype": "e4m3", "scales": "head"})"),
                 [&](const attune_attention& a) {
                   cases::encode(ATTUNE_FLOAT32, odd, cases::element_at(a.cache.v_scale, {1}));
                 });
  }
}

// A token whose key or value is on a page that does not exist is masked.
TEST_F(EmulatedPrefillMmaCodes, BadPages) {
  for (const char* cache :
       {R"("cache": {"page_size": 16, "dtype": "i8", "scales": "token", "separate_v_table": true})",
        R"("cache": {"page_size": 64, "dtype": "e4m3", "scales": "head", "separate_v_table": true})"}) {
    check_as_all(cases::Row(R"("heads": [2, 1], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "causal": true,
        "new_tokens": true, "seqlens_q": [70, 3], "seqlens_kv": [300, 150])")
                     .with(cache),
                 tests::spoil_pages);
  }
}

// A thread converts what it copied; warps share the numbers, and a tile's scales.
TEST_F(EmulatedPrefillMmaCodes, HasNoRaces) {
  const emulator::Watched watched;
  const emulator::Shuffled shuffled(7);
  for (const char* cache : {R"("cache": {"dtype": "e4m3", "scales": "head", "page_size": 64})",
                            R"("cache": {"dtype": "i8", "scales": "token", "page_size": 16})"}) {
    check_as_all(cases::Row(R"("heads": [2, 1], "head_dim": [64, 64], "dtype": "bf16", "causal": true, "kv": "paged",
        "new_tokens": true, "seqlens_q": [70, 130], "seqlens_kv": [200, 65])")
                     .with(cache),
                 {}, true);
  }
}

}  // namespace
}  // namespace attune::cuda
