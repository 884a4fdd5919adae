// SPDX-License-Identifier: Apache-2.0
// Prefill in the emulator: rows that the TMA cannot copy, and wrong tables.
#include <cstdint>
#include <string>
#include <vector>

#include "emulated_prefill.h"

namespace attune::cuda {
namespace {

// q, k and v that the TMA cannot read are copied first.
TEST_F(EmulatedPrefill, RowsAtAnyAddress) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 48], "dtype": "bf16", "causal": true,
      "seqlens_q": [40, 1, 9], "seqlens_kv": [50, 70, 33])");
  for (const char* rest :
       {R"("kv": "dense", "cu_seqlens_kv": false, "seqlens_kv": [40, 1, 9])", R"("kv": "dense")",
        R"("kv": "dense", "shared_kv": true)", R"("kv": "dense", "queries": "fixed", "seqlens_q": 20)",
        R"("kv": "dense", "queries": "fixed", "seqlens_q": 20, "seqlens_kv": [20, 20, 20])",
        R"("kv": "paged", "new_tokens": true, "cache": {"page_size": 16})",
        R"("kv": "paged", "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head"})"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 1, {}, Twist::kMovedRows), "") << rest;
  }
}

// Rows end where the next one begins, or before NaN: copied first, or read in place.
TEST_F(EmulatedPrefill, HeadDimsOfAnySize) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "bf16", "kv": "dense", "causal": true, "seqlens_q": [70, 1, 0],
      "seqlens_kv": [90, 260, 7])");
  for (const char* rest :
       {R"("head_dim": [36, 36])", R"("head_dim": [100, 100], "lse": false, "dtype": "f16")", R"("head_dim": [1, 1])",
        R"("head_dim": [3, 250], "alibi": 1)", R"("head_dim": [196, 20], "out_dtype": "e4m3", "out_scale": true)",
        R"("head_dim": [100, 100], "seqlens_kv": [70, 1, 0], "cu_seqlens_kv": false)",
        R"("head_dim": [20, 37], "seqlens_q": [2, 0, 1], "seqlens_kv": [1900, 5, 300],
                              "heads": [8, 1], "lse": false)",
        R"("head_dim": [100, 100], "kv": "paged", "new_tokens": true, "seqlens_kv": [90, 300, 4],
                              "cache": {"page_size": 16, "row_padding": 4})",
        R"("head_dim": [68, 36], "kv": "paged", "cache": {"page_size": 5, "layout": "hnd",
                              "row_padding": 4}, "dtype": "f16")",
        R"("head_dim": [40, 33], "kv": "paged", "new_tokens": true, "seqlens_kv": [90, 300, 4],
                              "cache": {"page_size": 16, "layout": "xpacked"})",
        R"("head_dim": [100, 36], "kv": "paged", "new_tokens": true, "seqlens_kv": [90, 300, 4],
                              "cache": {"page_size": 16, "row_padding": 4}, "prologue": {"append": true,
                              "v_bias": true, "rope": {"style": "linear", "dim": 64}})"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 1, {}, Twist::kRecomputeFails), "") << rest;
  }
}

// Caches that the TMA cannot copy: 16-bit queries in the fp32 kernel.
TEST_F(EmulatedPrefill, SixteenBitsAsFloats) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "bf16", "kv": "paged", "causal": true, "seqlens_q": [70, 0, 9],
      "seqlens_kv": [200, 60, 9], "cache": {"page_size": 16})");
  for (
      const char* rest :
      {R"("head_dim": [100, 100], "new_tokens": true)",
       R"("head_dim": [36, 20], "dtype": "f16", "cache": {"page_size": 5, "layout": "hnd"}, "lse": false)",
       R"("head_dim": [24, 24], "dtype": "f16", "new_tokens": true,
           "cache": {"page_size": 32, "dtype": "e4m3", "scales": "tensor", "layout": "xpacked", "x": 8})",
       R"("head_dim": [40, 40], "new_tokens": true, "cache": {"page_size": 32, "dtype": "i8", "scales": "token"},
           "prologue": {"append": true, "v_bias": true, "rope": {"style": "linear", "dim": 32}})",
       R"("head_dim": [64, 64], "new_tokens": true, "strides": "odd", "sinks": "mixed", "window": [90, 0],
           "cache": {"page_size": 24, "layout": "xpacked"}, "max_logits": true)",
       R"("head_dim": [64, 64], "cache": {"page_size": 24, "dtype": "f16"}, "alibi": 1, "out_dtype": "e4m3")",
       R"("head_dim": [100, 100], "new_tokens": true, "shared_kv": true, "prologue": {"append": true, "k_bias": true})",
       R"("head_dim": [100, 100], "heads": [8, 1], "seqlens_q": [2, 0, 1], "seqlens_kv": [1900, 60, 300])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2, {}, Twist::kNone, attention::Rows::kFp32), "") << rest;
  }
}

// 16-bit caches that the TMA cannot copy: gathered, 8 or 4 bytes at a time.
TEST_F(EmulatedPrefill, GathersRows) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "bf16", "kv": "paged", "causal": true, "seqlens_q": [70, 0, 9],
      "seqlens_kv": [200, 60, 309], "cache": {"page_size": 16})");
  for (
      const char* rest :
      {R"("head_dim": [100, 100])", R"("head_dim": [100, 100], "new_tokens": true)",
       R"("head_dim": [36, 20], "dtype": "f16", "cache": {"page_size": 5, "layout": "hnd"}, "lse": false)",
       R"("head_dim": [98, 34], "cache": {"page_size": 16, "row_padding": 2}, "window": [60, 0])",
       R"("head_dim": [180, 100], "new_tokens": true, "sinks": "mixed")",
       R"("head_dim": [252, 252], "cache": {"page_size": 24, "separate_v_table": true}, "max_logits": true)",
       R"("head_dim": [100, 100], "new_tokens": true, "shared_kv": true, "prologue": {"append": true, "k_bias": true})",
       R"("head_dim": [100, 100], "softcap": 20, "data": "spread")", R"("head_dim": [100, 100], "mask_bits": 2)",
       R"("head_dim": [68, 68], "kv": "contiguous")", R"("head_dim": [100, 100], "plant": "nan_v")",
       R"("head_dim": [100, 100], "heads": [8, 1], "seqlens_q": [2, 0, 1], "seqlens_kv": [1900, 60, 300])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2), "") << rest;
  }
}

// The same with x-packed pages, where 8, 4 or 2 tokens of V are gathered at a time.
TEST_F(EmulatedPrefill, GathersPackedPages) {
  const cases::Row common(R"("heads": [6, 2], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [40, 1, 70], "seqlens_kv": [40, 261, 201])");
  for (const char* cache :
       {R"("cache": {"page_size": 24})", R"("cache": {"page_size": 8})", R"("cache": {"page_size": 20})",
        R"("cache": {"page_size": 6})", R"("cache": {"page_size": 136, "separate_v_table": true})"}) {
    for (const char* rest :
         {R"("head_dim": [128, 128], "window": [20, 0])", R"("head_dim": [64, 40], "dtype": "f16", "new_tokens": true)",
          R"("head_dim": [40, 96], "new_tokens": true, "max_logits": true)",
          R"("head_dim": [128, 256], "new_tokens": true, "plant": "nan_v")"}) {
      EXPECT_EQ(run(tests::make_case(common.with(cache).set("cache.layout", "xpacked").with(rest)), 2), "")
          << cache << ", " << rest;
    }
  }
}

// e4m3 rows that the TMA cannot read are copied first; their scales stay.
TEST_F(EmulatedPrefill, CodesAtAnyAddress) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "e4m3", "out_dtype": "bf16",
      "kv": "dense", "causal": true, "strides": "odd", "seqlens_q": [70, 1, 0], "seqlens_kv": [90, 260, 7])");
  for (const char* rest : {R"("prologue": {"qkv_scale": true})", R"("plant": "nan_k")",
                           R"("queries": "fixed", "seqlens_q": 20, "prologue": {"qkv_scale": true})",
                           R"("seqlens_kv": [70, 1, 0], "cu_seqlens_kv": false, "head_dim": [192, 128])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

// What only the device knows: lengths are clamped, and keys on pages and rows out of range are masked.
TEST_F(EmulatedPrefill, TablesOutOfRange) {
  const auto set = [](const attune_tensor& t, const std::vector<int32_t>& values) {
    for (size_t i = 0; t.rank > 0 && i < values.size(); ++i)
      static_cast<int32_t*>(t.data)[static_cast<int64_t>(i) * t.stride[t.rank - 1]] = values[i];
  };
  const auto set_page = [](const attune_attention& a, int entry, int32_t page) {  // of the first sequence
    if (a.cache.page_table.rank > 0)
      static_cast<int32_t*>(a.cache.page_table.data)[entry * a.cache.page_table.stride[1]] = page;
  };
  const auto long_ones = [&](const attune_attention& a) {
    set(a.cu_seqlens_q, {0, 70, 500, 600}), set(a.cu_seqlens_kv, {0, 100, 5000, 6000});
    set(a.seqused_kv, {200, 1 << 30, 60}), set_page(a, 1, 1 << 20), set(a.cache.batch_index, {1, 99, -3});
  };
  const auto negative_ones = [&](const attune_attention& a) {
    set(a.cu_seqlens_q, {10, 70, 70, 75}), set(a.seqused_kv, {-5, 60, INT32_MIN});
    set_page(a, 1, -1), set_page(a, 2, INT32_MIN);
  };
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "causal": true,
      "seqlens_q": [60, 0, 20], "seqlens_kv": [200, 60, 60])");
  for (const char* rest :
       {R"("kv": "dense")", R"("kv": "dense", "seqused": true, "dtype": "f32")",
        R"("kv": "dense", "dtype": "e4m3", "out_dtype": "bf16")",
        R"("kv": "paged", "cache": {"page_size": 16}, "new_tokens": true)",
        R"("kv": "paged", "cache": {"page_size": 16, "dtype": "e4m3", "scales": "token"}, "new_tokens": true)",
        R"("kv": "paged", "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head", "layout": "xpacked"})",
        R"("kv": "paged", "cache": {"page_size": 32, "layout": "xpacked"}, "new_tokens": true, "window": [60, 0])",
        R"("kv": "contiguous", "cache": {"batch_index": true, "dtype": "i8", "scales": "token"})",
        R"("kv": "contiguous", "cache": {"batch_index": true}, "dtype": "f32", "new_tokens": true)"}) {
    const cases::Case spec = tests::make_case(common.with(rest));
    EXPECT_EQ(run(spec, 1, long_ones), "") << rest;
    EXPECT_EQ(run(spec, 1, negative_ones), "") << rest;
  }
}

}  // namespace
}  // namespace attune::cuda
