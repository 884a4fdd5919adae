// SPDX-License-Identifier: Apache-2.0
// Tests of one form of the prefill kernel's blocks, which the configuration chooses for some problems only.
#pragma once

#include "emulated_prefill.h"
#include "spoilt_attention.h"

namespace attune::cuda {

class EmulatedPrefillVariant : public EmulatedPrefill {
 protected:
  // "" if the last case had the form that the tests are about.
  virtual std::string why_not_variant() const = 0;

  // "" if the case has that form, and its outputs are the oracle's. Rows that are recomputed are wrong: keys that were
  // not copied would be poison, NaN, and recomputing such rows would hide it.
  std::string run_variant(const cases::Row& row, int layers = 1, Twist twist = Twist::kRecomputeFails,
                          const std::function<void(const attune_attention&)>& edit = {}) const {
    std::string failure = run(tests::make_case(row), layers, edit, twist);
    return failure.empty() ? why_not_variant() : failure;
  }

  // Rows that are recomputed.
  void expect_nan(const cases::Row& row) const {
    EXPECT_EQ(run_variant(row.with(R"("plant": "nan_v")"), 1, Twist::kNone), "");
    EXPECT_EQ(run_variant(row.with(R"("plant": "nan_k")"), 1, Twist::kNone), "");
  }
  // The same, and pages that do not exist.
  void expect_nan_and_bad_pages(const cases::Row& common) const {
    const cases::Row row = common.with(R"("heads": [8, 2], "kv": "paged", "seqlens_q": [140, 66],
        "seqlens_kv": [390, 130], "cache": {"page_size": 16, "separate_v_table": true})");
    expect_nan(row);
    EXPECT_EQ(run_variant(row, 1, Twist::kNone, tests::spoil_value_pages), "");
    EXPECT_EQ(run_variant(row, 1, Twist::kNone, tests::spoil_pages), "");
  }
  // Row blocks that are split along the keys: a long one, and by one block of the grid alone.
  void expect_splits(const cases::Row& row) const {
    EXPECT_EQ(run_variant(row, 2), "");
    EXPECT_GT(splits_, 0);
    EXPECT_EQ(run_variant(row, 1, Twist::kOneBlock), "");
  }
  // The order in which blocks and warps go on changes no bit.
  void expect_any_order(const cases::Row& row, uint64_t seeds, unsigned clusters) const {
    for (uint64_t seed = 1; seed <= seeds; ++seed) {
      const emulator::Shuffled order(seed, clusters);
      EXPECT_EQ(run_variant(row, 2), "") << seed;
    }
  }
};

}  // namespace attune::cuda
