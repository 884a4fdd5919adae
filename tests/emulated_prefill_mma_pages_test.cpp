// SPDX-License-Identifier: Apache-2.0
// The prefill kernel of GPUs before Hopper in the emulator: pages of all sizes. A warp copies 16 rows of a tile (8
// where tiles have 32 keys), whose page ids were fetched a tile before.
#include "emulated_prefill_mma.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

class EmulatedPrefillMmaPages : public EmulatedPrefillMma {
 protected:
  static constexpr int kPageSizes[] = {1, 8, 16, 24, 48, 64};
  // The first tile begins before the first visible key, the last one has keys behind the sequence's.
  static constexpr const char* kRagged =
      R"("kv": "paged", "causal": true, "seqlens_q": [70, 3], "seqlens_kv": [200, 131],
      "window": [75, 0])";

  static constexpr const char* kCaches[] = {R"("cache": {})", R"("cache": {"dtype": "e4m3", "scales": "head"})",
                                            R"("cache": {"dtype": "i8", "scales": "token"})"};

  // On GPUs with room for all, and for little.
  static void check_all(const cases::Row& row, const Edit& edit = {}, bool few_blocks = false) {
    for (const char* like : {"sm_80", "sm_86"})
      EXPECT_EQ(run(tests::make_case(row), like, few_blocks, edit), "") << row.text() << " " << like;
  }
  // Every third entry of K's table is no page, and of V's if it has one.
  static void spoil(const attune_attention& a) {
    const attune_tensor& table = a.cache.page_table;
    for (int64_t b = 0; b < table.shape[0]; ++b) {
      for (int64_t e = 1 - b; e < table.shape[1]; e += 3)
        tests::set_entry(table, {b, e}, tests::wild(b + e, a.cache.k.shape[0]));
    }
    if (a.cache.v_page_table.data != nullptr) tests::spoil_value_pages(a);
  }
};

TEST_F(EmulatedPrefillMmaPages, OfAllSizes) {
  const cases::Row common = cases::Row(kRagged).set("dtype", "bf16");
  for (const int page_size : kPageSizes) {
    for (const char* rest : {R"("heads": [2, 1], "head_dim": [128, 128], "cache": {"row_padding": 8})",
                             R"("heads": [2, 2], "head_dim": [64, 64], "cache": {"layout": "hnd"})"})
      check_all(common.with(rest).set("cache.page_size", page_size));
  }
  for (const int page_size : {1, 16}) {
    for (const char* dims : {R"("head_dim": [72, 40])", R"("head_dim": [192, 24])", R"("head_dim": [256, 256])"})
      check_all(common.with(dims).with(R"("heads": [1, 1])").set("cache.page_size", page_size));
  }
}

TEST_F(EmulatedPrefillMmaPages, OfCodes) {
  const cases::Row common = cases::Row(kRagged).set("dtype", "bf16");
  for (const char* cache : {kCaches[1], kCaches[2]}) {
    for (const int page_size : kPageSizes) {
      check_all(
          common.with(cache).with(R"("heads": [2, 1], "head_dim": [128, 128])").set("cache.page_size", page_size));
    }
  }
  for (const int page_size : {1, 16}) {
    for (const char* dims : {R"("head_dim": [96, 48])", R"("head_dim": [256, 256])", R"("head_dim": [32, 64])"})
      check_all(common.with(kCaches[2]).with(dims).with(R"("heads": [1, 1])").set("cache.page_size", page_size));
  }
}

TEST_F(EmulatedPrefillMmaPages, ThatAreNotThere) {
  const cases::Row common(R"("kv": "paged", "causal": true, "new_tokens": true, "seqlens_q": [70, 3],
      "seqlens_kv": [200, 131], "heads": [2, 1], "head_dim": [128, 128], "dtype": "bf16")");
  for (const char* cache : kCaches) {
    for (const int page_size : kPageSizes) {
      for (const bool separate : {false, true})
        check_all(common.with(cache).set("cache.page_size", page_size).set("cache.separate_v_table", separate), spoil);
    }
  }
}

TEST_F(EmulatedPrefillMmaPages, OfSequences) {
  const cases::Row common(R"("kv": "contiguous", "causal": true, "new_tokens": true, "seqlens_q": [70, 3, 1],
      "seqlens_kv": [100, 131, 0], "heads": [2, 1], "head_dim": [128, 128], "dtype": "bf16")");
  for (const char* cache : kCaches) {
    for (const bool index : {false, true}) check_all(common.with(cache).set("cache.batch_index", index));
  }
}

// A warp's page ids are replaced when its lanes have read them, and are there when they read them.
TEST_F(EmulatedPrefillMmaPages, HaveNoRaces) {
  const emulator::Watched watched;
  const emulator::Shuffled shuffled(11);
  const cases::Row common(R"("kv": "paged", "causal": true, "new_tokens": true, "seqlens_q": [70, 130],
      "seqlens_kv": [150, 65], "heads": [2, 1], "head_dim": [128, 128], "dtype": "bf16")");
  for (const char* cache : kCaches) {
    for (const int page_size : {1, 16, 24, 64})
      check_all(common.with(cache).set("cache.page_size", page_size), {}, true);
  }
}

}  // namespace
}  // namespace attune::cuda
