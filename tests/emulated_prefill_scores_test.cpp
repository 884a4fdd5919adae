// SPDX-License-Identifier: Apache-2.0
// Masks, tables, softcap and ALiBi of the prefill kernel in the emulator, compared with the oracle.
#include <array>
#include <cmath>

#include "emulated_prefill.h"

namespace attune::cuda {
namespace {

// Sets channel 0 of each row of a 16-bit tensor to x(row, head), the others to zero.
template <class Value>
void set_rows(const attune_tensor& t, const Value& x) {
  for (int64_t row = 0; row < t.shape[0]; ++row) {
    for (int64_t head = 0; head < t.shape[1]; ++head) {
      for (int64_t d = 0; d < t.shape[2]; ++d) {
        const float value = d == 0 ? x(row, head) : 0.0f;
        static_cast<uint16_t*>(t.data)[row * t.stride[0] + head * t.stride[1] + d] =
            t.dtype == ATTUNE_BFLOAT16 ? emulator::to_bf16(value) : emulator::to_half(value);
      }
    }
  }
}

TEST_F(EmulatedPrefill, MasksAndTables) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "dense",
      "seqlens_q": [70, 9], "seqlens_kv": [200, 60])");
  for (const char* rest :
       {R"("causal": true, "mask_bits": 2)", R"("causal": true, "ranges": [[5, 150], [0, 9, 20, 40]])", R"("bias": 2)",
        R"("queries": "fixed", "seqlens_q": [40, 40], "mask_bits": 1)",
        R"("causal": true, "window": [20, 0], "ranges": [[150, 2147483647], [8, 51, 55, 900]])",
        R"("causal": true, "window": [20, 0], "ranges": [[-2147483648, 140], [-2147483648, 2147483647]])",
        R"("causal": true, "ranges": [[63, 120, 127, 190], [3, 52]], "seqlens_q": [200, 9])",
        R"("t5_buckets": 32, "t5_max_distance": 128, "t5_bidirectional": true)",
        R"("t5_buckets": 32, "t5_max_distance": 128)", R"("alibi": 1, "alibi_sqrt": true)",
        R"("mask_bits": 2, "mask_start": 40, "mask_keys": 30)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

// Scores in the range of each softcap method, and mixtures: of rows, of tiles at edges and inside.
TEST_F(EmulatedPrefill, SoftcapOfAllSizes) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "dense", "causal": true,
      "seqlens_q": [70, 130], "seqlens_kv": [400, 130], "max_logits": true)");
  for (const char* rest :
       {R"("softcap": 30)", R"("softcap": 50, "data": "spread")", R"("softcap": 20, "data": "spread", "dtype": "f16")",
        R"("softcap": 2)", R"("softcap": 5)", R"("softcap": 100000)", R"("softcap": 1e7)",
        R"("softcap": 1e7, "dtype": "f32", "head_dim": [64, 64])",
        R"("softcap": 30, "softmax_scale": 0.3, "window": [150, 0])", R"("softcap": 30, "softmax_scale": -0.1)",
        R"("softcap": 50, "softmax_scale": 1e-6)", R"("softcap": 25, "data": "far")",
        R"("softcap": 30, "seqlens_kv": [30, 0])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

// However high the cap, scores are as exact as without one. A polynomial of tanh with a small absolute error is not.
TEST_F(EmulatedPrefill, HighSoftcapsLeaveScoresAsTheyAre) {
  const cases::Row common(R"("heads": [4, 2], "causal": true, "max_logits": true, "dtype": "f16", "seqlens_q": [20],
      "data": "spread")");
  for (const double cap : {100.0, 101.0, 1e4, 1e6, 1e7}) {
    EXPECT_EQ(run(tests::make_case(common.set("softcap", cap))), "") << cap;
  }
}

// Scores of one to three caps below zero, where the polynomials fall and the cap does not: row i's are all out of
// range, or reach up to -0.8 caps, or to 1.2.
TEST_F(EmulatedPrefill, SoftcapOfLowScores) {
  const auto edit = [](const attune_attention& a) {
    set_rows(a.q, [](int64_t row, int64_t) { return row / 64 % 2 == 0 ? 1.0f : -0.25f; });
    set_rows(a.k, [](int64_t row, int64_t) { return -4 - 11 * std::fmod(0.618f * static_cast<float>(row), 1.0f); });
  };
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "dense", "causal": true,
      "softmax_scale": 1, "seqlens_q": [130, 9], "seqlens_kv": [400, 140], "max_logits": true)");
  for (const double softcap : {5.0, 9.0, 2.0}) {
    EXPECT_EQ(run(tests::make_case(common.set("softcap", softcap)), 1, edit), "") << softcap;
  }
}

// Mask bits of fixed queries: a row for each token of a sequence.
TEST_F(EmulatedPrefill, MaskBitsOfFixedQueries) {
  EXPECT_EQ(run(tests::make_case(R"({"name": "x", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "dense",
      "queries": "fixed", "cu_seqlens_kv": false, "seqlens_q": 70, "seqlens_kv": [90, 90], "mask_bits": 2})")),
            "");
}

// Token 193, the last of a block's 64, and the first one of the next block see later and earlier keys by a range alone.
// A range ends at the largest integer.
TEST_F(EmulatedPrefill, RangesThatOneRowOfABlockIsIn) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "kv": "dense", "causal": true,
      "seqlens_q": [80], "seqlens_kv": [210])");
  for (const char* rest : {R"("ranges": [[193, 199]])", R"("window": [10, 0], "ranges": [[3, 194]])",
                           R"("window": [10, 0], "ranges": [[0, 2147483647]])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

// Positions beyond a bias's rows have none: in memory the next head's follow.
TEST_F(EmulatedPrefill, BiasOfFewerRowsThanPositions) {
  cases::Problem problem(tests::make_case(R"({"name": "x", "heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16",
      "kv": "dense", "causal": true, "seqlens_q": [70], "seqlens_kv": [90], "bias": 2})"));
  problem.host().bias.shape[1] = 60;
  EXPECT_EQ(run(problem), "");
}

TEST_F(EmulatedPrefill, Alibi) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [128, 128], "dtype": "bf16", "kv": "dense", "alibi": 1,
      "seqlens_q": [70, 130], "seqlens_kv": [900, 130])");
  for (const char* rest : {R"("causal": true, "max_logits": true)", R"("causal": true, "window": [150, 0])",
                           R"("causal": true, "softcap": 20)", R"("softmax_scale": -0.1)", R"("softmax_scale": 1e-20)",
                           R"("max_logits": true)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

// Scores that grow from tile to tile, in the order of the tiles: products leave the range of each polynomial, at one
// end or at both, and P the range of 16 bits. No row may be recomputed: that would hide it.
TEST_F(EmulatedPrefill, SoftcapOfGrowingScores) {
  constexpr int kTiles = 8;
  struct Scores {
    const char* rest;
    std::array<float, kTiles> caps, offset;  // scores: offset + caps * softcap * (-1 .. 0.5)
    float cap;
  };
  constexpr std::array<float, kTiles> kGrowing = {0.1f, 0.3f, 0.8f, 0.8f, 1.25f, 1.25f, 2.2f, 0.2f}, kNone = {};
  const cases::Row common(R"("heads": [2, 1], "head_dim": [64, 64], "kv": "dense", "causal": true, "softmax_scale": 1,
      "seqlens_q": [70], "seqlens_kv": [1024])");
  for (const Scores& x :
       {Scores{R"("softcap": 30, "dtype": "bf16")", kGrowing, kNone, 30},
        {R"("softcap": 30, "dtype": "bf16", "window": [700, 0], "max_logits": true)", kGrowing, kNone, 30},
        {R"("softcap": 50, "dtype": "f16")", kGrowing, kNone, 50},
        {R"("softcap": 20, "dtype": "bf16")", kGrowing, kNone, 20},
        {R"("softcap": 5, "dtype": "bf16")", kGrowing, kNone, 5},
        {R"("softcap": 5, "dtype": "f16")", {0, 0, 1, 0, 0, 1, 0, 0}, {-4, -4, -8, -4, -4, -8, -4, -4}, 5},
        {R"("softcap": 30, "dtype": "f16")", {}, {-8, -8, 8, 8, 9, 10, 11, 12}, 30},
        {R"("softcap": 30, "dtype": "f16", "max_logits": true)", {}, {-8, -8, 8, 8, 9, 10, 11, 12}, 30},
        {R"("softcap": 200, "dtype": "f16")", {}, {-5, -5, -5, -5, 2, 4, 8, 20}, 200},
        {R"("softcap": 1000, "dtype": "bf16")", {}, {-20, -20, -20, -20, -20, 20, 40, 80}, 1000},
        {R"("softcap": 200, "dtype": "bf16")", {}, {-40, -40, 30, 30, 35, 60, 60, 60}, 200},
        {R"("softcap": 1000, "dtype": "bf16")",
         {0, 0, 0, 0, 0, 0.12f, 0, 0},
         {-300, -300, -220, -140, -60, -260, -100, -100},
         1000}}) {
    const auto edit = [&](const attune_attention& a) {
      set_rows(a.q, [](int64_t row, int64_t) { return row / 8 % 2 == 0 ? 1.0f : -1.0f; });
      set_rows(a.k, [&](int64_t row, int64_t head) {
        const auto tile = static_cast<size_t>(std::clamp<int64_t>(kTiles - 1 - row / 128, 0, kTiles - 1));
        const float part = std::fmod(0.618f * static_cast<float>(row + 5 * head), 1.0f);
        return x.offset[tile] + x.caps[tile] * x.cap * (1.5f * part - 1);
      });
    };
    EXPECT_EQ(run(tests::make_case(common.with(x.rest)), 1, edit, Twist::kRecomputeFails), "") << x.rest;
  }
}

// A tile's P are finite in fp32, and their sum is not: 2^127 and more above the row_max_ref of earlier tiles. O, which
// sees P after it was scaled down, is finite. Some rows have equal scores.
TEST_F(EmulatedPrefill, SumsOfFinitePThatAreInfinite) {
  struct Scores {
    const char* rest;
    float low, high, slope;
  };
  const cases::Row common(R"("heads": [2, 1], "head_dim": [64, 64], "kv": "dense", "causal": true, "softmax_scale": 1,
      "seqlens_q": [70], "seqlens_kv": [700], "lse": true)");
  for (const Scores& x : {Scores{R"("dtype": "bf16")", 0, 87.5f, 0},
                          {R"("dtype": "bf16")", 0, 88, 0},
                          {R"("dtype": "bf16")", 0, 88.5f, 0},
                          {R"("dtype": "f16", "sinks": "normal")", 0, 88, 0},
                          {R"("dtype": "bf16", "alibi": 1)", 0, 88, 0x1p-20f},
                          {R"("dtype": "bf16", "alibi": 1)", 0, 88, -0x1p-20f},
                          {R"("dtype": "bf16", "softcap": 1000)", -300, -206, 0},
                          {R"("dtype": "bf16", "seqlens_q": [2], "seqlens_kv": [2900], "heads": [8, 1])", 0, 88, 0}}) {
    const auto edit = [&](const attune_attention& a) {
      set_rows(a.q, [](int64_t row, int64_t) { return row % 3 == 2 ? 0.0f : 1.0f; });
      set_rows(a.k, [&](int64_t row, int64_t) { return row / 128 == 2 && row % 5 == 0 ? x.high : x.low; });
      for (int64_t h = 0; a.alibi_slopes.dtype != ATTUNE_DTYPE_NONE && h < a.alibi_slopes.shape[0]; ++h)
        static_cast<float*>(a.alibi_slopes.data)[h * a.alibi_slopes.stride[0]] = x.slope;
    };
    EXPECT_EQ(run(tests::make_case(common.with(x.rest)), 1, edit), "") << x.rest << " " << x.high << " " << x.slope;
  }
}

// Small scores except in half of a tile, where they are just inside, just outside or further outside of the two-term
// polynomial's range, at one end: it returns to zero at -1.73 caps. Only one warp of one group, and one of a thread's
// two rows, sees them, in the last tile of a split or in the one before.
TEST_F(EmulatedPrefill, SoftcapOfSmallScores) {
  struct Where {
    int warp, half, tile;
  };
  const cases::Row common(R"("heads": [2, 1], "head_dim": [64, 64], "kv": "dense", "causal": true,
      "softmax_scale": 1, "seqlens_q": [40], "seqlens_kv": [700])");
  for (const float part : {0.9976f, 1.0027f, 1.5f, -0.9976f, -1.0027f, -2.5f, -5.0f, -8.64f, -20.0f, 8.64f, 20.0f}) {
    for (const Where& x : {Where{1, 0, 1}, {1, 1, 0}, {4, 0, 0}, {4, 1, 1}}) {
      const float border = x.half == 0 ? 6.0149f : 9.0513f;  // of caps of 30 and 50
      const auto edit = [&](const attune_attention& a) {
        set_rows(a.q, [&](int64_t row, int64_t) { return row / 8 == x.warp && row / 4 % 2 == x.half ? 1.0f : 0.0f; });
        set_rows(a.k, [&](int64_t row, int64_t head) {
          if (row / 128 == x.tile && row % 2 == 0) return part * border;
          return 3 * std::fmod(0.618f * static_cast<float>(row + 5 * head), 1.0f) - 2;
        });
      };
      const char* const cap = x.half == 0 ? R"("softcap": 30, "dtype": "bf16")" : R"("softcap": 50, "dtype": "f16")";
      EXPECT_EQ(run(tests::make_case(common.with(cap)), 1, edit, Twist::kRecomputeFails), "")
          << part << " " << x.warp << " " << x.half << " " << x.tile;
    }
  }
}

// Small scores, and some that leave the range after a few tiles; missing pages, and windows.
TEST_F(EmulatedPrefill, SoftcapOverCaches) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "kv": "paged", "cache": {"page_size": 16},
      "causal": true, "seqlens_q": [70, 40], "seqlens_kv": [700, 300])");
  for (const char* rest : {R"("softcap": 50, "dtype": "bf16", "new_tokens": true)",
                           R"("softcap": 30, "dtype": "f16", "softmax_scale": 0.45, "seqlens_q": [70, 3])",
                           R"("softcap": 30, "dtype": "bf16", "softmax_scale": 0.3, "window": [400, 0])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 2, {}, Twist::kRecomputeFails), "") << rest;
  }
}

// A page is missing in every tile: the loop of small scores, which masks nothing, must take none.
TEST_F(EmulatedPrefill, SoftcapOverCachesWithoutSomePages) {
  const auto lose_pages = [](const attune_attention& a) {
    const attune_tensor& table = a.cache.page_table;
    for (int64_t entry = 3; entry < 44; entry += 8) static_cast<int32_t*>(table.data)[entry * table.stride[1]] = -1;
  };
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "kv": "paged", "cache": {"page_size": 16},
      "causal": true, "seqlens_q": [70, 40], "seqlens_kv": [700, 300], "softcap": 50)");
  for (const char* dtype : {"bf16", "f16"}) {
    EXPECT_EQ(run(tests::make_case(common.set("dtype", dtype)), 1, lose_pages, Twist::kRecomputeFails), "") << dtype;
  }
}

// Slopes of both signs, so steep that P leaves the range of fp32 within a tile.
TEST_F(EmulatedPrefill, AlibiOfBothSigns) {
  const auto edit = [](const attune_attention& a) {
    for (int h = 0; h < 2; ++h)
      static_cast<float*>(a.alibi_slopes.data)[h * a.alibi_slopes.stride[0]] = h == 0 ? 1.5f : -1.5f;
  };
  const cases::Row common(R"("heads": [2, 2], "head_dim": [64, 64], "kv": "dense", "alibi": 1, "seqlens_q": [70, 130],
      "seqlens_kv": [900, 130])");
  for (const char* rest : {R"("dtype": "bf16")", R"("dtype": "f16")", R"("dtype": "f16", "causal": true)",
                           R"("dtype": "bf16", "causal": true, "window": [300, 0])"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 1, edit, Twist::kRecomputeFails), "") << rest;
  }
}

// Queries and keys of finished sequences, which other cases poison, hold numbers here, and shared memory holds keys of
// earlier work tiles.
TEST_F(EmulatedPrefill, FinishedSequencesOfNumbers) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "dtype": "bf16", "causal": true,
      "zero_finished": true, "seqlens_q": [400, 40, 1], "seqlens_kv": [600, 160, 90], "max_logits": true,
      "poison": false)");
  for (const char* rest :
       {R"("kv": "dense", "finished": [0, 1, 0])", R"("kv": "dense", "finished": [0, 0, 0], "skip_decode": true)",
        R"("kv": "dense", "finished": [0, 1, 0], "softcap": 20)",
        R"("kv": "dense", "finished": [0, 1, 0], "mask_bits": 1)",
        R"("kv": "paged", "finished": [0, 1, 0], "cache": {"page_size": 16})",
        R"("kv": "paged", "finished": [0, 1, 0], "cache": {"page_size": 16}, "new_tokens": true)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest))), "") << rest;
  }
}

}  // namespace
}  // namespace attune::cuda
