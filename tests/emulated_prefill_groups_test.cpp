// SPDX-License-Identifier: Apache-2.0
// The prefill kernel in the emulator where a block has three consumer groups: heads of at most 64 channels.
#include "emulated_prefill_variant.h"

namespace attune::cuda {
namespace {

class EmulatedPrefillGroups : public EmulatedPrefillVariant {
 protected:
  std::string why_not_variant() const override { return rows_ == 192 ? "" : "a block has not 192 rows"; }
};

const cases::Row& common() {
  static const cases::Row row(R"("dtype": "bf16", "head_dim": [64, 64], "causal": true)");
  return row;
}

TEST_F(EmulatedPrefillGroups, DenseKeys) {
  for (
      const char* rest :
      {R"("heads": [4, 1], "seqlens_q": [150, 70, 65, 1], "seqlens_kv": [450, 75, 65, 9])",
       R"("heads": [8, 1], "queries": "fixed", "cu_seqlens_kv": false, "seqlens_q": 150, "seqlens_kv": [150, 150, 150])",
       R"("heads": [7, 1], "seqlens_q": [100, 70, 3], "seqlens_kv": [230, 90, 700], "dtype": "f16", "lse": true)",
       R"("heads": [2, 2], "seqlens_q": [330, 300], "seqlens_kv": [530, 300], "sinks": "normal", "out_dtype": "f32")",
       R"("heads": [8, 2], "head_dim": [40, 24], "seqlens_q": [130, 70], "seqlens_kv": [630, 90])",
       R"("heads": [4, 1], "seqlens_q": [130, 90], "seqlens_kv": [330, 90], "max_logits": true, "causal": false)",
       R"("heads": [8, 2], "seqlens_q": [130, 70], "seqlens_kv": [530, 90], "window": [60, 0], "causal": false)"}) {
    EXPECT_EQ(run_variant(common().with(R"("kv": "dense")").with(rest), 2), "") << rest;
  }
}

// Tiles of a cache have 96 keys: their boxes are of a power of two.
TEST_F(EmulatedPrefillGroups, CachesOfAllKinds) {
  for (
      const char* rest :
      {R"("heads": [4, 1], "kv": "paged", "seqlens_q": [150, 70], "seqlens_kv": [430, 75], "cache": {"page_size": 16})",
       R"("heads": [8, 1], "kv": "paged", "seqlens_q": [65, 130], "seqlens_kv": [257, 200], "lse": true,
           "cache": {"page_size": 64, "layout": "hnd"})",
       R"("heads": [1, 1], "kv": "paged", "seqlens_q": [370, 190], "seqlens_kv": [370, 229], "causal": false,
           "dtype": "f16", "cache": {"page_size": 24})",
       R"("heads": [16, 2], "kv": "contiguous", "seqlens_q": [40, 90], "seqlens_kv": [200, 90], "sinks": "normal")",
       R"("heads": [8, 2], "head_dim": [32, 48], "kv": "paged", "seqlens_q": [100, 67], "seqlens_kv": [100, 390],
           "cache": {"page_size": 1}, "max_logits": true)",
       R"("heads": [8, 2], "kv": "paged", "seqlens_q": [150, 70], "seqlens_kv": [530, 90], "window": [100, 0],
           "cache": {"page_size": 64}, "new_tokens": true)",
       R"("heads": [6, 2], "kv": "paged", "seqlens_q": [130, 70], "seqlens_kv": [430, 90],
           "cache": {"page_size": 96}, "new_tokens": true)"}) {
    EXPECT_EQ(run_variant(common().with(rest), 2), "") << rest;
  }
}

TEST_F(EmulatedPrefillGroups, NanAndBadPages) {
  expect_nan_and_bad_pages(common());
  expect_nan(common().with(R"("heads": [8, 2], "kv": "dense", "seqlens_q": [140, 66], "seqlens_kv": [390, 130])"));
}

TEST_F(EmulatedPrefillGroups, SplitsAndManyWorkTiles) {
  for (const char* kv : {R"("kv": "paged", "cache": {"page_size": 16})", R"("kv": "dense")"}) {
    const cases::Row row = common().with(R"("heads": [4, 1])").with(kv);
    expect_splits(row.with(R"("seqlens_q": [70, 98], "seqlens_kv": [5000, 130])"));
    const std::vector<int64_t> many(31, 100);
    EXPECT_EQ(run_variant(row.set("seqlens_q", many).set("seqlens_kv", many), 2), "") << kv;
  }
}

// Blocks of 192 rows take longer than those of 128: the choice follows the mean length, but with batch_invariant.
TEST_F(EmulatedPrefillGroups, OnlyWherePromptsFillThem) {
  const auto rows_of = [](const char* lengths, const char* rest = R"("heads": [1, 1])") {
    EXPECT_EQ(run(tests::make_case(common().with(R"("kv": "dense")").with(lengths).with(rest))), "") << lengths << rest;
    return rows_;
  };
  EXPECT_EQ(rows_of(R"("seqlens_q": [100, 128], "seqlens_kv": [100, 128])"), 128);
  EXPECT_EQ(rows_of(R"("seqlens_q": [130, 190], "seqlens_kv": [130, 190])"), 192);
  EXPECT_EQ(rows_of(R"("seqlens_q": [200, 250], "seqlens_kv": [200, 250])"), 128);
  EXPECT_EQ(rows_of(R"("seqlens_q": [300, 380], "seqlens_kv": [300, 380])"), 192);
  const char* const invariant = R"("heads": [1, 1], "batch_invariant": true)";
  EXPECT_EQ(rows_of(R"("seqlens_q": [100, 128], "seqlens_kv": [100, 128])", invariant), 192);
  EXPECT_EQ(rows_of(R"("seqlens_q": [300, 380], "seqlens_kv": [300, 380])", invariant), 192);
  for (const char* rest : {R"("softcap": 30)", R"("alibi": 1)", R"("mask_bits": 1)", R"("head_dim": [64, 80])"})
    EXPECT_EQ(rows_of(R"("heads": [4, 1], "seqlens_q": [300], "seqlens_kv": [300])", rest), 128);
}

TEST_F(EmulatedPrefillGroups, WarpsInAnyOrder) {
  std::vector<int64_t> queries(9, 100), keys(9, 105);
  keys[3] = 700, keys[4] = 131;
  for (const char* kv : {R"("kv": "paged", "cache": {"page_size": 16})", R"("kv": "dense")"}) {
    expect_any_order(common().with(R"("heads": [4, 1])").with(kv).set("seqlens_q", queries).set("seqlens_kv", keys), 3,
                     1);
  }
}

}  // namespace
}  // namespace attune::cuda
