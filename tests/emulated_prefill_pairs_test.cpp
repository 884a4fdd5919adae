// SPDX-License-Identifier: Apache-2.0
// The prefill kernel in the emulator where two blocks copy the keys of a cache together (Config::kCluster).
#include "emulated_prefill_variant.h"

namespace attune::cuda {
namespace {

class EmulatedPrefillPairs : public EmulatedPrefillVariant {
 protected:
  void SetUp() override {
    EmulatedPrefill::SetUp();
    blocks_ = 4;
  }
  std::string why_not_variant() const override { return cluster_ == 2 ? "" : "there are no pairs"; }
};

const cases::Row& common() {
  static const cases::Row row(R"("dtype": "bf16", "head_dim": [128, 128], "causal": true)");
  return row;
}

TEST_F(EmulatedPrefillPairs, CachesOfAllKinds) {
  for (
      const char* rest :
      {R"("heads": [4, 1], "kv": "paged", "seqlens_q": [130, 70], "seqlens_kv": [430, 75], "cache": {"page_size": 16})",
       R"("heads": [8, 2], "kv": "paged", "seqlens_q": [65, 130], "seqlens_kv": [257, 200], "lse": true,
           "cache": {"page_size": 64, "layout": "hnd"})",
       R"("heads": [2, 1], "kv": "paged", "seqlens_q": [300, 1], "seqlens_kv": [300, 129], "causal": false,
           "dtype": "f16", "cache": {"page_size": 24})",
       R"("heads": [16, 2], "kv": "contiguous", "seqlens_q": [40, 90], "seqlens_kv": [200, 90], "sinks": "normal")",
       R"("heads": [8, 2], "head_dim": [96, 72], "kv": "paged", "seqlens_q": [100, 67], "seqlens_kv": [100, 390],
           "cache": {"page_size": 1}, "max_logits": true)",
       R"("heads": [8, 2], "head_dim": [80, 80], "kv": "paged", "seqlens_q": [130, 70], "seqlens_kv": [530, 90],
           "cache": {"page_size": 64}, "new_tokens": true)",
       R"("heads": [8, 2], "head_dim": [192, 128], "kv": "paged", "seqlens_q": [130, 70], "seqlens_kv": [430, 90],
           "cache": {"page_size": 16})"}) {
    EXPECT_EQ(run_variant(common().with(rest)), "") << rest;
  }
}

// Tiles of new tokens are rows: a box of keys for each line of channels.
TEST_F(EmulatedPrefillPairs, CacheAndNewTokens) {
  for (const char* rest :
       {R"("seqlens_q": [130, 70, 65], "seqlens_kv": [430, 75, 65], "cache": {"page_size": 16})",
        R"("seqlens_q": [200, 3], "seqlens_kv": [205, 333], "window": [100, 0], "cache": {"page_size": 32})"}) {
    const cases::Row row = common().with(R"("heads": [4, 1], "kv": "paged", "new_tokens": true)").with(rest);
    EXPECT_EQ(run_variant(row, 2), "") << rest;
  }
}

// The first QK GEMM of the next work tile overlaps the last PV GEMM of this one, in both blocks.
TEST_F(EmulatedPrefillPairs, DenseKeys) {
  for (
      const char* rest :
      {R"("heads": [4, 1], "seqlens_q": [130, 70, 65, 1], "seqlens_kv": [430, 75, 65, 9])",
       R"("heads": [8, 2], "queries": "fixed", "cu_seqlens_kv": false, "seqlens_q": 150, "seqlens_kv": [150, 150, 150])",
       R"("heads": [8, 2], "seqlens_q": [130, 70], "seqlens_kv": [230, 90], "alibi": 1, "dtype": "f16", "lse": true)",
       R"("heads": [4, 1], "seqlens_q": [130, 70], "seqlens_kv": [230, 90], "softcap": 20)",
       R"("heads": [4, 1], "seqlens_q": [130, 70], "seqlens_kv": [1730, 90], "softcap": 50)",
       R"("heads": [8, 2], "seqlens_q": [130, 70], "seqlens_kv": [730, 90], "softcap": 30)",
       R"("heads": [4, 1], "head_dim": [80, 80], "seqlens_q": [130, 70], "seqlens_kv": [630, 90])",
       R"("heads": [4, 1], "head_dim": [192, 128], "seqlens_q": [130, 70], "seqlens_kv": [330, 90])",
       R"("heads": [4, 1], "seqlens_q": [130, 70], "seqlens_kv": [530, 90], "window": [60, 0], "causal": false)"}) {
    EXPECT_EQ(run_variant(common().with(R"("kv": "dense")").with(rest), 2), "") << rest;
  }
}

TEST_F(EmulatedPrefillPairs, Masks) {
  for (const char* rest : {R"("window": [70, 0])", R"("window": [128, 9], "causal": false)", R"("mask_bits": 1)",
                           R"("ranges": [[3, 140, 7, 7], [20, 60]])"}) {
    const cases::Row row = common()
                               .with(R"("heads": [8, 2], "kv": "paged", "seqlens_q": [140, 66], "seqlens_kv": [390, 66],
                         "cache": {"page_size": 16})")
                               .with(rest);
    // Keys that mask_bits hide from all rows hold NaN: such rows are recomputed.
    EXPECT_EQ(run_variant(row, 1,
                          std::string_view(rest).find("bits") != std::string_view::npos ? Twist::kNone
                                                                                        : Twist::kRecomputeFails),
              "")
        << rest;
  }
}

TEST_F(EmulatedPrefillPairs, NanAndBadPages) { expect_nan_and_bad_pages(common()); }

// Both blocks of a pair have the same splits; the work tiles after them come through the ring of tile indices.
TEST_F(EmulatedPrefillPairs, SplitsAndManyWorkTiles) {
  const cases::Row row = common().with(R"("heads": [4, 1], "kv": "paged", "cache": {"page_size": 16})");
  expect_splits(row.with(R"("seqlens_q": [30, 98], "seqlens_kv": [5000, 130])"));
  const std::vector<int64_t> many(31, 66);
  EXPECT_EQ(run_variant(row.set("seqlens_q", many).set("seqlens_kv", many), 2), "");
  const cases::Row heads = common().with(R"("heads": [24, 6], "kv": "paged", "seqlens_q": [70, 130, 64],
      "seqlens_kv": [200, 130, 64], "cache": {"page_size": 16})");
  EXPECT_EQ(run_variant(heads, 1, Twist::kTwoHeadTiles), "");
  EXPECT_EQ(run_variant(heads, 1, Twist::kOneHeadTile), "");
}

// Work tiles of one tile each, so that the first block is as far ahead of the other one as it may be.
TEST_F(EmulatedPrefillPairs, IndicesFarAhead) {
  const std::vector<int64_t> many(40, 66);
  const cases::Row row =
      common()
          .with(R"("heads": [4, 1], "head_dim": [80, 80], "kv": "paged", "cache": {"page_size": 64})")
          .set("seqlens_q", many)
          .set("seqlens_kv", many);
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const emulator::Shuffled order(seed, 1);
    EXPECT_EQ(run_variant(row, 1, Twist::kOneBlock), "") << seed;
  }
}

TEST_F(EmulatedPrefillPairs, BlocksInAnyOrder) {
  std::vector<int64_t> queries(9, 70), keys(9, 75);
  keys[3] = 700, keys[4] = 131;
  const cases::Row row = common().with(R"("heads": [4, 1], "kv": "paged", "cache": {"page_size": 16})");
  expect_any_order(row.set("seqlens_q", queries).set("seqlens_kv", keys), 6, 2);
}

// The blocks of a pair have neighbouring tokens of the same heads (Config::kRowPairs). By causality the first one sees
// nothing of the last tile, and where a prompt ends in its half, the other one has no rows.
class EmulatedPrefillRowPairs : public EmulatedPrefillPairs {
 protected:
  void SetUp() override {
    EmulatedPrefillPairs::SetUp();
    row_pairs_ = true;
  }
};

TEST_F(EmulatedPrefillRowPairs, DenseKeys) {
  for (const char* rest :
       {R"("heads": [2, 2], "seqlens_q": [300, 128, 129, 1, 256], "seqlens_kv": [430, 128, 140, 9, 257])",
        R"("heads": [2, 2], "queries": "fixed", "cu_seqlens_kv": false, "seqlens_q": 390, "seqlens_kv": [390, 390])",
        R"("heads": [2, 2], "seqlens_q": [290, 70], "seqlens_kv": [330, 90], "alibi": 1, "dtype": "f16", "lse": true)",
        R"("heads": [2, 2], "seqlens_q": [290, 70], "seqlens_kv": [290, 90], "softcap": 20, "max_logits": true)",
        R"("heads": [3, 1], "seqlens_q": [120, 43], "seqlens_kv": [330, 43], "sinks": "normal")",
        R"("heads": [2, 2], "head_dim": [80, 80], "seqlens_q": [300, 70], "seqlens_kv": [530, 90], "causal": false)",
        R"("heads": [2, 2], "head_dim": [192, 128], "seqlens_q": [400, 70], "seqlens_kv": [400, 90])",
        R"("heads": [2, 2], "seqlens_q": [390, 70], "seqlens_kv": [530, 90], "window": [60, 0])",
        R"("heads": [2, 2], "seqlens_q": [390, 270], "seqlens_kv": [200, 0], "lse": true)"}) {
    EXPECT_EQ(run_variant(common().with(R"("kv": "dense")").with(rest), 2), "") << rest;
  }
}

TEST_F(EmulatedPrefillRowPairs, Caches) {
  for (const char* rest : {R"("seqlens_q": [300, 128, 1], "seqlens_kv": [430, 375, 65], "cache": {"page_size": 16})",
                           R"("seqlens_q": [260, 130], "seqlens_kv": [260, 390], "cache": {"page_size": 24},
                              "new_tokens": true)",
                           R"("seqlens_q": [260, 130], "seqlens_kv": [560, 390], "cache": {"page_size": 64},
                              "window": [128, 9], "causal": false, "head_dim": [192, 128])",
                           R"("seqlens_q": [260, 130], "seqlens_kv": [560, 390], "cache": {"page_size": 64},
                              "ranges": [[3, 140, 7, 7], [20, 60]])"}) {
    EXPECT_EQ(run_variant(common().with(R"("heads": [2, 2], "kv": "paged")").with(rest), 2), "") << rest;
  }
}

TEST_F(EmulatedPrefillRowPairs, NanBeyondWhatTheFirstBlockSees) {
  expect_nan(common().with(R"("heads": [2, 2], "kv": "dense", "seqlens_q": [300, 256], "seqlens_kv": [390, 256])"));
}

TEST_F(EmulatedPrefillRowPairs, BlocksInAnyOrder) {
  std::vector<int64_t> queries(9, 140), keys(9, 145);
  queries[3] = keys[3] = 600, keys[4] = 231;
  const cases::Row row = common().with(R"("heads": [2, 2], "kv": "dense")");
  expect_any_order(row.set("seqlens_q", queries).set("seqlens_kv", keys), 6, 2);
}

}  // namespace
}  // namespace attune::cuda
