// SPDX-License-Identifier: Apache-2.0
// The prefill kernels' own source on the CPU (tests/emulator), without a GPU and with poisoned memory: compares their
// output with the oracle's.
#include "emulated_prefill.h"

#include <bit>
#include <cmath>

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 300;

TEST_F(EmulatedPrefill, DenseCausal) {
  EXPECT_EQ(run(tests::make_case(R"({"name": "x", "heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16",
      "kv": "dense", "causal": true, "seqlens_q": [150, 0, 3], "seqlens_kv": [150, 5, 300], "max_logits": true})")),
            "");
}

// Lengths that the host knows: the list follows from the block's index where nothing is split.
TEST_F(EmulatedPrefill, SequencesThatAreAlike) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "dense",
      "queries": "fixed", "cu_seqlens_kv": false)");
  for (const char* rest : {R"("seqlens_q": 150, "seqlens_kv": [150, 150, 150], "causal": true)",
                           R"("seqlens_q": 70, "seqlens_kv": [400, 400], "causal": true, "max_logits": true)",
                           R"("seqlens_q": 70, "seqlens_kv": [200, 200], "out_dtype": "f32")",
                           R"("seqlens_q": 5, "seqlens_kv": [3, 3], "causal": true)",
                           R"("seqlens_q": 70, "seqlens_kv": [1400], "heads": [4, 1])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2), "") << rest;
  }
}

// The short epilogue, where nobody asks for sums or maxima: blocks with padding rows, splits, recomputed rows, heads
// that do not fill a block, and rows of out in any order.
TEST_F(EmulatedPrefill, NothingButOutputs) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "dense", "causal": true,
      "lse": false)");
  for (
      const char* rest :
      {R"("seqlens_q": [150, 0, 3], "seqlens_kv": [150, 5, 300])",
       R"("seqlens_q": [70, 9], "seqlens_kv": [60, 200], "heads": [10, 2], "dtype": "f16")",
       R"("seqlens_q": [40, 70], "seqlens_kv": [40, 130], "strides": "transposed", "head_dim": [64, 64])",
       R"("seqlens_q": [70, 130], "seqlens_kv": [90, 260], "head_dim": [96, 80], "plant": "nan_v")",
       R"("seqlens_q": [2, 1], "seqlens_kv": [2900, 300], "head_dim": [64, 128])",
       R"("seqlens_q": [70, 9], "seqlens_kv": [60, 200], "sinks": "normal")",
       R"("seqlens_q": [70, 9], "seqlens_kv": [60, 200], "max_logits": true)",
       R"("seqlens_q": [70, 9], "seqlens_kv": [60, 200], "out_dtype": "e4m3", "out_scale": true)",
       R"("queries": "fixed", "seqlens_q": 70, "seqlens_kv": [200, 200], "out_dtype": "f32", "cu_seqlens_kv": false)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2), "") << rest;
  }
}

// Rows of out that 16-byte stores do not fit, each for one reason: first address, strides, or what follows.
TEST_F(EmulatedPrefill, OutputsAnywhere) {
  struct Out {
    const char* rest;
    int64_t padding;  // elements after each row
    size_t offset;    // bytes
  };
  const cases::Row common(R"("heads": [4, 2], "dtype": "bf16", "kv": "dense", "causal": true, "seqlens_q": [70, 3],
      "seqlens_kv": [90, 200])");
  for (const Out& x : {Out{R"("head_dim": [64, 64])", 0, 2}, Out{R"("head_dim": [64, 64])", 3, 0},
                       Out{R"("head_dim": [64, 36])", 4, 0}, Out{R"("head_dim": [64, 64], "lse": false)", 0, 2},
                       Out{R"("head_dim": [64, 36], "lse": false)", 4, 0},
                       Out{R"("head_dim": [64, 64], "dtype": "e4m3", "out_dtype": "bf16")", 0, 2},
                       Out{R"("head_dim": [64, 64], "kv": "paged", "cache": {"page_size": 16})", 0, 2}}) {
    cases::Problem problem(tests::make_case(common.with(x.rest)));
    attune_tensor& out = problem.host().out;
    out = problem.arena().add("out anywhere", static_cast<attune_dtype>(out.dtype),
                              {out.shape[0], out.shape[1], out.shape[2]}, {{}, {0, 0, x.padding}, x.offset});
    EXPECT_EQ(run(problem), "") << x.rest << " " << x.padding << " " << x.offset;
  }
}

// Scores that grow from tile to tile so much that row_max_ref must rise, or rows are recomputed; bad values; splits.
TEST_F(EmulatedPrefill, ScoresOfAllSizes) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "kv": "dense", "causal": true,
      "seqlens_q": [70, 130], "seqlens_kv": [900, 130], "lse": true)");
  for (const char* rest :
       {R"("data": "spread", "dtype": "bf16")", R"("data": "far", "dtype": "f16")",
        R"("data": "far", "dtype": "bf16", "window": [2, 0])", R"("data": "ones_v", "dtype": "bf16")",
        R"("data": "huge", "dtype": "bf16", "window": [2, 0])", R"("data": "huge", "dtype": "bf16")",
        R"("plant": "nan_v", "dtype": "f16")", R"("plant": "nan_k", "dtype": "bf16")",
        R"("plant": "nan_k", "dtype": "bf16", "window": [0, 0], "max_logits": true)",
        R"("softmax_scale": 3, "dtype": "f16", "sinks": "normal")", R"("softmax_scale": 3, "dtype": "bf16")",
        R"("softmax_scale": 12, "dtype": "bf16", "seqlens_q": [70, 0])",
        R"("softmax_scale": 40, "dtype": "bf16", "seqlens_q": [0, 130])",
        R"("softmax_scale": 12, "dtype": "bf16", "seqlens_q": [70, 0], "max_logits": true)",
        R"("seqlens_q": [2, 1], "seqlens_kv": [2900, 300], "heads": [8, 1], "softmax_scale": 5, "dtype": "bf16")"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2), "") << rest;
  }
}

// An infinity in a key that is also a value: where it makes the score -inf, the key must not count.
TEST_F(EmulatedPrefill, KeysOfInfiniteScores) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "shared_kv": true, "causal": true,
      "seqlens_q": [70, 130], "seqlens_kv": [300, 130], "max_logits": true, "plant": "inf_v")");
  for (const char* rest :
       {R"("dtype": "bf16", "kv": "dense")", R"("dtype": "f32", "kv": "dense")",
        R"("dtype": "f16", "kv": "paged", "cache": {"page_size": 16}, "new_tokens": true)",
        R"("dtype": "bf16", "kv": "dense", "softcap": 20)",
        R"("dtype": "bf16", "kv": "paged", "seqlens_q": [2, 1], "seqlens_kv": [2900, 300], "heads": [8, 1])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedPrefill, ScoresOfAllSizesOverCaches) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "kv": "paged", "cache": {"page_size": 16},
      "causal": true, "seqlens_q": [70, 40], "seqlens_kv": [700, 200], "lse": true)");
  for (const char* rest : {R"("dtype": "f16", "softmax_scale": 3, "sinks": "normal")",
                           R"("dtype": "bf16", "softmax_scale": 12, "new_tokens": true)",
                           R"("dtype": "bf16", "softmax_scale": 40, "window": [300, 0])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2), "") << rest;
  }
}

// Their rows become zero, or stay as they are; with skip_decode also those of sequences with one query. By then all
// stages hold others' keys.
TEST_F(EmulatedPrefill, FinishedSequences) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "causal": true,
      "seqlens_q": [70, 40, 1], "seqlens_kv": [600, 60, 90], "max_logits": true, "finished": [0, 1, 0])");
  for (const char* rest :
       {R"("kv": "dense", "zero_finished": true)", R"("kv": "dense")",
        R"("kv": "dense", "zero_finished": true, "queries": "fixed", "seqlens_q": 70, "seqlens_kv": [70, 70, 70],
           "cu_seqlens_kv": false)",
        R"("kv": "dense", "queries": "fixed", "seqlens_q": 70, "seqlens_kv": [70, 70, 70], "cu_seqlens_kv": false)",
        R"("kv": "paged", "cache": {"page_size": 16}, "zero_finished": true, "new_tokens": true)",
        R"("kv": "paged", "cache": {"page_size": 16}, "skip_decode": true, "finished": [0, 0, 0])",
        R"("kv": "paged", "cache": {"page_size": 16}, "skip_decode": true, "zero_finished": true)",
        R"("kv": "dense", "zero_finished": true, "mask_bits": 1)",
        R"("kv": "dense", "zero_finished": true, "ranges": [[5, 60], [0, 9, 20, 40], [0, 1]])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedPrefill, CacheAndNewTokens) {
  const cases::Row common(R"("heads": [6, 2], "dtype": "bf16", "kv": "paged", "new_tokens": true, "causal": true)");
  const cases::Row wide =
      common.with(R"("head_dim": [128, 128], "seqlens_q": [40, 1, 70], "seqlens_kv": [0, 260, 131])");
  // The cache ends within a tile that later rows see whole, and new tokens follow.
  const cases::Row narrow = common.with(R"("head_dim": [64, 64], "seqlens_q": [90, 200], "seqlens_kv": [255, 127])");
  for (const char* cache : {R"("cache": {"page_size": 16})", R"("cache": {"page_size": 3})",
                            R"("cache": {"page_size": 256, "layout": "hnd"})"}) {
    EXPECT_EQ(run(tests::make_case(wide.with(cache))), "") << cache;
    EXPECT_EQ(run(tests::make_case(narrow.with(cache))), "") << cache;
  }
}

// Also where V is part of K, and without a cache.
TEST_F(EmulatedPrefill, Prologues) {
  const cases::Row common(R"("heads": [4, 1], "dtype": "bf16", "kv": "paged", "new_tokens": true, "causal": true,
      "seqlens_q": [40, 1, 9], "seqlens_kv": [0, 70, 33], "cache": {"page_size": 16})");
  for (
      const char* rest :
      {R"("head_dim": [128, 128], "prologue": {"append": true, "v_bias": true, "rope": {"style": "linear", "dim": 64}})",
       R"("head_dim": [128, 64], "shared_kv": true, "prologue": {"append": true, "k_bias": true, "rope":
           {"style": "linear", "dim": 32, "offset": 64}})",
       R"("head_dim": [64, 64], "kv": "dense", "new_tokens": false, "seqlens_kv": [40, 1, 9], "cu_seqlens_kv": false,
          "cache": {}, "prologue": {"q_bias": true, "k_bias": true, "v_bias": true, "logn": 8,
          "rope": {"style": "linear", "dim": 32}})",
       R"("head_dim": [100, 36], "kv": "dense", "new_tokens": false, "queries": "fixed", "seqlens_q": 40,
          "seqlens_kv": [40, 40, 40], "cu_seqlens_kv": false, "cache": {}, "dtype": "f16",
          "prologue": {"rope": {"style": "linear", "dim": 64}}, "window": [20, 0])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedPrefill, Windows) {
  const cases::Row common(R"("heads": [2, 2], "dtype": "bf16", "seqlens_q": [200, 9])");
  const cases::Row cached = common.with(R"("head_dim": [128, 128], "kv": "paged", "seqlens_kv": [320, 260],
      "cache": {"page_size": 16})");
  for (const char* window : {R"("window": [20, 0])", R"("window": [150, 7])", R"("window": [0, 0])"})
    EXPECT_EQ(run(tests::make_case(cached.with(window))), "") << window;
  // The first queries stand before key 0.
  const cases::Row dense = common.with(R"("head_dim": [64, 64], "kv": "dense", "seqlens_kv": [20, 3],
      "max_logits": true)");
  for (const char* window : {R"("window": [2147483647, 5])", R"("window": [3, 9])", R"("window": [0, 70])"})
    EXPECT_EQ(run(tests::make_case(dense.with(window))), "") << window;
}

TEST_F(EmulatedPrefill, HeadDims) {
  const cases::Row common(R"("heads": [3, 1], "dtype": "f16", "kv": "contiguous", "causal": true,
      "seqlens_q": [50, 7], "seqlens_kv": [90, 260])");
  for (const char* dims : {R"("head_dim": [64, 64])", R"("head_dim": [96, 80])", R"("head_dim": [192, 128])",
                           R"("head_dim": [256, 256])", R"("head_dim": [40, 24])"})
    EXPECT_EQ(run(tests::make_case(common.with(dims))), "") << dims;
}

TEST_F(EmulatedPrefill, SplitsAlongTheKeysAndRunsAgain) {
  const cases::Row common(R"("head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [1, 2], "seqlens_kv": [2900, 300], "max_logits": true, "cache": {"page_size": 64})");
  for (const char* heads : {R"("heads": [8, 1])", R"("heads": [48, 1])", R"("heads": [2, 2])"})
    EXPECT_EQ(run(tests::make_case(common.with(heads)), 2), "") << heads;
}

// A warp has the stats of 32 splits at a time. By ALiBi the largest scores are in the last split.
TEST_F(EmulatedPrefill, MoreSplitsThanAWarpHasLanes) {
  blocks_ = 40;
  const cases::Row common(R"("heads": [2, 1], "head_dim": [16, 16], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [3], "seqlens_kv": [18000], "max_logits": true, "cache": {"page_size": 64})");
  for (const char* rest : {"", R"("alibi": true)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2), "") << rest;
    EXPECT_GT(most_splits_, 32);
  }
}

// A lane combines two vectors of channels; blocks have 64 rows.
TEST_F(EmulatedPrefill, SplitsOfWideHeadsAndOfFloats) {
  blocks_ = 13;
  const cases::Row common(R"("heads": [8, 1], "kv": "paged", "causal": true, "seqlens_q": [2, 1],
      "seqlens_kv": [1500, 70], "max_logits": true, "cache": {"page_size": 64})");
  for (const char* rest : {R"("head_dim": [256, 256], "dtype": "bf16")", R"("head_dim": [64, 200], "dtype": "f16")",
                           R"("head_dim": [64, 64], "dtype": "f32")", R"("head_dim": [136, 40], "dtype": "f32")"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2), "") << rest;
    EXPECT_GT(most_splits_, 4) << rest;
  }
}

// Work tiles go through some head tiles, then the next ones, of which there are fewer at the end.
TEST_F(EmulatedPrefill, HeadTilesInTurns) {
  const cases::Row common(R"("head_dim": [64, 64], "dtype": "bf16", "kv": "dense", "causal": true)");
  for (const char* rest : {R"("heads": [5, 5], "seqlens_q": [150, 0, 70], "seqlens_kv": [150, 5, 300])",
                           R"("heads": [3, 3], "seqlens_q": [1, 2], "seqlens_kv": [1400, 300])",
                           R"("heads": [4, 4], "seqlens_q": [40], "seqlens_kv": [90], "dtype": "f32")"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2, {}, Twist::kTwoHeadTiles), "") << rest;
  }
}

// Splits in which no row, or not every row, sees a key, and splits whose rows are recomputed.
TEST_F(EmulatedPrefill, PartsOfAllKinds) {
  const auto spoil_pages = [](const attune_attention& a, int64_t first, int64_t end) {
    const attune_tensor& table = a.cache.page_table;
    for (int64_t i = first; i < std::min(end, table.shape[1]); ++i)
      static_cast<int32_t*>(table.data)[i * table.stride[1]] = -1;  // of the first sequence
  };
  const cases::Row split(R"("head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_kv": [2900, 300], "cache": {"page_size": 64})");
  for (const char* rest : {R"("seqlens_q": [1, 2], "heads": [8, 1], "max_logits": true)",
                           R"("seqlens_q": [2, 1], "heads": [24, 1], "sinks": "mixed", "out_dtype": "f32")"}) {
    for (const int64_t first : {0, 20}) {
      EXPECT_EQ(run(tests::make_case(split.with(rest)), 1,
                    [&](const attune_attention& a) { spoil_pages(a, first, 1 << 20); }),
                "")
          << rest << ", pages from " << first;
    }
  }
  for (const char* rest :
       {R"("plant": "nan_v", "kv": "paged", "cache": {"page_size": 64})", R"("plant": "nan_k", "kv": "dense")",
        R"("plant": "inf_v", "kv": "dense", "dtype": "f32")"}) {
    EXPECT_EQ(
        run(tests::make_case(cases::Row(R"("head_dim": [64, 64], "dtype": "bf16", "causal": true, "seqlens_q": [3, 4],
            "seqlens_kv": [300, 1400], "heads": [16, 1], "max_logits": true)")
                                 .with(rest))),
        "")
        << rest;
  }
}

TEST_F(EmulatedPrefill, ScoresAndOutputs) {
  const cases::Row common(R"("heads": [4, 1], "head_dim": [64, 64], "dtype": "bf16", "kv": "dense",
      "seqlens_q": [70, 9], "seqlens_kv": [200, 60])");
  for (const char* rest :
       {R"("softcap": 5)", R"("alibi": 1, "out_dtype": "f32")", R"("sinks": "normal", "out_dtype": "e4m3")",
        R"("alibi": 1, "alibi_sqrt": true, "causal": true)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedPrefill, CachesOfEightBits) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 80], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [70, 9], "seqlens_kv": [200, 330])");
  for (const char* rest : {R"("cache": {"dtype": "e4m3", "scales": "head", "page_size": 16}, "new_tokens": true)",
                           R"("cache": {"dtype": "i8", "scales": "token", "page_size": 64, "layout": "hnd"})",
                           R"("cache": {"dtype": "e5m2", "scales": "tensor", "page_size": 48})"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedPrefill, CachesOfEightBitsWithScoresOfAllKinds) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [70, 30], "seqlens_kv": [330, 64],
      "cache": {"dtype": "e4m3", "scales": "head", "page_size": 16})");
  for (const char* rest :
       {R"("data": "spread", "max_logits": true)", R"("data": "far", "new_tokens": true)",
        R"("softmax_scale": -0.1, "new_tokens": true)", R"("softcap": 20, "new_tokens": true, "max_logits": true)",
        R"("alibi": 1, "new_tokens": true)", R"("window": [70, 0], "new_tokens": true, "head_dim": [64, 64])",
        R"("head_dim": [256, 192], "max_logits": true)", R"("head_dim": [192, 128], "new_tokens": true)",
        R"("seqlens_q": [2, 1], "seqlens_kv": [2900, 300], "heads": [32, 1])",
        R"("plant": "nan_v", "new_tokens": true)",
        R"("cache": {"dtype": "e4m3", "scales": "token", "page_size": 16}, "alibi": 1, "new_tokens": true)",
        R"("cache": {"dtype": "i8", "scales": "tensor", "page_size": 16}, "new_tokens": true)",
        R"("cache": {"dtype": "e5m2", "scales": "head", "page_size": 16}, "dtype": "f16", "new_tokens": true)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

// Query rows of very different magnitude, and scales that undo it, negate scores, or have no inverse.
TEST_F(EmulatedPrefill, CachesOfEightBitsWithScalesOfAllSizes) {
  struct Sizes {
    int q, row;  // powers of two: of all queries, and from a row to the next
    double k_scale, v_scale;
  };
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "paged", "causal": true,
      "seqlens_q": [70, 9], "seqlens_kv": [200, 70], "cache": {"dtype": "e4m3", "scales": "tensor", "page_size": 16},
      "max_logits": true)");
  for (const Sizes& x : {Sizes{-90, 0, 0x1p90, 1}, Sizes{-110, 1, 0x1p100, -2}, Sizes{60, 0, 0x1p-60, 0x1p-70},
                         Sizes{15, -2, 0x1p-15, 16}, Sizes{0, 0, -1, 0}, Sizes{0, 0, 0, 1}, Sizes{0, -2, 1, 1}}) {
    for (const char* rest : {R"("new_tokens": false)", R"("new_tokens": true)"}) {
      const auto edit = [&](const attune_attention& a) {
        auto* const q = static_cast<uint16_t*>(a.q.data);
        for (int64_t row = 0; row < a.q.shape[0]; ++row) {
          for (int64_t i = 0; i < a.q.shape[1] * a.q.shape[2]; ++i) {
            uint16_t& at = q[row * a.q.stride[0] + i];
            const float times = std::ldexp(std::bit_cast<float>(static_cast<uint32_t>(at) << 16),
                                           x.q + x.row * static_cast<int>(row % 40));
            at = emulator::to_bf16(times);
          }
        }
        *static_cast<float*>(a.cache.k_scale.data) *= static_cast<float>(x.k_scale);
        *static_cast<float*>(a.cache.v_scale.data) *= static_cast<float>(x.v_scale);
      };
      EXPECT_EQ(run(tests::make_case(common.with(rest)), 1, edit), "")
          << x.q << " " << x.row << " " << x.k_scale << " " << x.v_scale << " " << rest;
    }
  }
}

// e4m3 queries, keys and values: lengths around a tile, rows that see nothing of their first tile or at all.
TEST_F(EmulatedPrefill, Codes) {
  const cases::Row common(R"("heads": [3, 1], "head_dim": [128, 128], "dtype": "e4m3", "out_dtype": "bf16",
      "kv": "dense", "seqlens_q": [150, 0, 70], "seqlens_kv": [150, 5, 300])");
  for (const char* rest :
       {R"("causal": true, "heads": [4, 2], "max_logits": true)", R"("causal": true, "prologue": {"qkv_scale": true})",
        R"("out_dtype": "f32", "seqlens_kv": [129, 3, 257])", R"("causal": true, "window": [40, 0])",
        R"("window": [20, 7], "sinks": "normal", "out_dtype": "f16")",
        R"("causal": true, "softmax_scale": -0.1, "out_dtype": "e4m3", "out_scale": true)",
        R"("strides": "transposed", "causal": true)", R"("strides": "packed", "seqlens_kv": [150, 0, 70])",
        R"("finished": [1, 0, 0], "zero_finished": true)", R"("finished": [0, 0, 1], "causal": true)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedPrefill, CodesOfOtherHeadDims) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "e4m3", "out_dtype": "bf16", "kv": "dense", "causal": true,
      "seqlens_q": [50, 7], "seqlens_kv": [90, 260], "prologue": {"qkv_scale": true})");
  for (const char* dims : {R"("head_dim": [64, 64])", R"("head_dim": [192, 128])", R"("head_dim": [80, 48])",
                           R"("head_dim": [256, 128])", R"("head_dim": [16, 16])", R"("head_dim": [96, 96])"})
    EXPECT_EQ(run(tests::make_case(common.with(dims))), "") << dims;
}

// Scores that grow from tile to tile so much that row_max_ref must rise, or rows are recomputed; bad values; splits.
TEST_F(EmulatedPrefill, CodesOfAllSizes) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "e4m3", "out_dtype": "bf16",
      "kv": "dense", "causal": true, "seqlens_q": [70, 130], "seqlens_kv": [900, 130])");
  for (const char* rest :
       {R"("data": "spread")", R"("data": "far")", R"("data": "far", "window": [2, 0])", R"("data": "equal")",
        R"("data": "ones_v")", R"("plant": "nan_v")", R"("plant": "nan_k")", R"("softmax_scale": 0.6)",
        R"("softmax_scale": 0.6, "max_logits": true)",
        R"("softmax_scale": 0.5, "prologue": {"qkv_scale": true}, "head_dim": [256, 128], "heads": [6, 2])",
        R"("seqlens_q": [2, 1], "seqlens_kv": [2900, 300], "heads": [8, 1], "softmax_scale": 0.6)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2), "") << rest;
  }
}

// fp32 queries, keys and values: lengths around a tile, rows that see nothing of their first tile or at all, any
// strides.
TEST_F(EmulatedPrefill, Floats) {
  const cases::Row common(R"("heads": [3, 1], "head_dim": [128, 128], "dtype": "f32", "kv": "dense",
      "seqlens_q": [150, 0, 70], "seqlens_kv": [150, 5, 300])");
  for (const char* rest :
       {R"("causal": true, "heads": [4, 2], "max_logits": true)", R"("seqlens_kv": [65, 3, 257])",
        R"("causal": true, "window": [40, 0])", R"("window": [20, 7], "sinks": "normal", "out_dtype": "f16")",
        R"("causal": true, "softmax_scale": -0.1, "out_dtype": "e4m3", "out_scale": true)",
        R"("strides": "transposed", "causal": true)", R"("strides": "odd", "causal": true)",
        R"("strides": "packed", "seqlens_kv": [150, 0, 70])", R"("softcap": 20, "causal": true)",
        R"("finished": [1, 0, 0], "zero_finished": true)", R"("finished": [0, 0, 1], "causal": true)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedPrefill, KeysOnPagesThatAreNotThere) {
  const auto lacks_a_page = [](const attune_attention& a) {
    static_cast<int32_t*>(a.cache.page_table.data)[1] = 1 << 20;
  };
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "kv": "paged", "causal": true,
      "seqlens_q": [40, 9], "seqlens_kv": [150, 70], "new_tokens": true)");
  for (const char* dtype : {"bf16", "f32"}) {
    for (const int64_t page_size : {16, 48, 3}) {
      const cases::Row row = common.set("dtype", dtype).set("cache.page_size", page_size);
      EXPECT_EQ(run(tests::make_case(row), 1, lacks_a_page), "") << dtype << " " << page_size;
    }
  }
}

// Caches of any type, layout and page size; a prologue.
TEST_F(EmulatedPrefill, FloatsOverCaches) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 80], "dtype": "f32", "kv": "paged", "causal": true,
      "seqlens_q": [70, 9, 1], "seqlens_kv": [200, 330, 0])");
  for (const char* rest :
       {R"("cache": {"page_size": 16}, "new_tokens": true)",
        R"("cache": {"page_size": 3, "layout": "hnd"}, "max_logits": true)",
        R"("cache": {"page_size": 32, "layout": "xpacked"})", R"("kv": "contiguous", "window": [60, 0])",
        R"("cache": {"dtype": "e4m3", "scales": "head", "page_size": 16}, "new_tokens": true)",
        R"("cache": {"dtype": "i8", "scales": "token", "page_size": 64, "layout": "hnd"})",
        R"("cache": {"dtype": "bf16", "page_size": 48, "layout": "xpacked"})",
        R"("cache": {"page_size": 16}, "new_tokens": true, "prologue": {"append": true, "v_bias": true,
            "rope": {"style": "linear", "dim": 64}})"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

// Scores that grow by more than a tile's range from tile to tile, non-finite values, masks and tables, splits.
TEST_F(EmulatedPrefill, FloatsOfAllSizes) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "f32", "kv": "dense", "causal": true,
      "seqlens_q": [20, 70], "seqlens_kv": [300, 70])");
  for (const char* rest :
       {R"("data": "spread")", R"("data": "far", "window": [2, 0])", R"("data": "equal")", R"("plant": "nan_v")",
        R"("plant": "nan_k", "head_dim": [160, 192])", R"("plant": "inf_v", "strides": "odd")",
        R"("alibi": 1, "mask_bits": 2)", R"("bias": 2, "ranges": [[5, 150], [0, 9, 20, 40]])",
        R"("seqlens_q": [2, 1], "seqlens_kv": [1400, 300], "heads": [8, 1])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

TEST_F(EmulatedPrefill, FloatsOfOtherHeadDims) {
  const cases::Row common(R"("heads": [4, 2], "dtype": "f32", "kv": "dense", "causal": true, "seqlens_q": [50, 7],
      "seqlens_kv": [90, 260])");
  for (const char* dims :
       {R"("head_dim": [64, 64])", R"("head_dim": [192, 128])", R"("head_dim": [80, 48])", R"("head_dim": [256, 256])",
        R"("head_dim": [3, 5])", R"("head_dim": [96, 96])", R"("head_dim": [128, 200])"})
    EXPECT_EQ(run(tests::make_case(common.with(dims))), "") << dims;
}

TEST_F(EmulatedPrefill, MatchesTheOracleOnTheTable) {
  check_table(all_cases(kRandomCases), 100, [](const cases::Case& spec) { return run(spec); });
}

}  // namespace
}  // namespace attune::cuda
