// SPDX-License-Identifier: Apache-2.0
// The prefill kernels in the emulator: batches of many work tiles, and pages that do not exist.
#include <map>

#include "emulated_prefill.h"
#include "spoilt_attention.h"

namespace attune::cuda {
namespace {

class EmulatedPrefillBatches : public EmulatedPrefill {};

// A token whose key or value is on a page that does not exist is masked, whichever producer loads the tiles.
TEST_F(EmulatedPrefillBatches, BadPagesOfValues) {
  const cases::Row common(R"("heads": [4, 2], "kv": "paged", "causal": true, "new_tokens": true, "seqlens_q": [70, 3],
      "seqlens_kv": [300, 150], "max_logits": true)");
  for (const char* rest :
       {R"("dtype": "bf16", "head_dim": [128, 128], "cache": {"page_size": 16, "separate_v_table": true})",
        R"("dtype": "bf16", "head_dim": [64, 64], "softcap": 20, "cache": {"page_size": 8, "separate_v_table": true})",
        R"("dtype": "f16", "head_dim": [64, 64], "plant": "nan_v",
           "cache": {"page_size": 16, "separate_v_table": true})",
        R"("dtype": "bf16", "head_dim": [64, 64], "cache": {"page_size": 24, "separate_v_table": true})",
        R"("dtype": "bf16", "head_dim": [128, 128],
           "cache": {"page_size": 24, "layout": "xpacked", "separate_v_table": true})",
        R"("dtype": "bf16", "head_dim": [128, 128],
           "cache": {"page_size": 16, "layout": "xpacked", "separate_v_table": true})",
        R"("dtype": "bf16", "head_dim": [128, 128],
           "cache": {"page_size": 16, "dtype": "i8", "scales": "token", "separate_v_table": true})",
        R"("dtype": "bf16", "head_dim": [192, 128],
           "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head", "separate_v_table": true})",
        R"("dtype": "bf16", "head_dim": [64, 64],
           "cache": {"page_size": 16, "dtype": "e4m3", "layout": "xpacked", "separate_v_table": true})",
        R"("dtype": "f32", "head_dim": [64, 64], "cache": {"page_size": 12, "separate_v_table": true})",
        R"("dtype": "f32", "head_dim": [64, 64], "plant": "nan_v",
           "cache": {"page_size": 16, "separate_v_table": true})"}) {
    const cases::Case spec = tests::make_case(common.with(rest));
    EXPECT_EQ(run(spec, 1, tests::spoil_value_pages), "") << rest;
    EXPECT_EQ(run(spec, 1, tests::spoil_pages), "") << rest << " both";
  }
}

// Rows that are recomputed, because another row sees a NaN, must mask such tokens, too.
TEST_F(EmulatedPrefillBatches, BadPagesOfValuesBesideNan) {
  const cases::Row common(R"("heads": [4, 2], "head_dim": [64, 64], "kv": "paged", "causal": true,
      "seqlens_q": [3, 70], "seqlens_kv": [150, 100], "plant": "nan_v")");
  for (const char* rest :
       {R"("dtype": "bf16", "cache": {"page_size": 16, "separate_v_table": true})",
        R"("dtype": "bf16", "cache": {"page_size": 16, "dtype": "e4m3", "scales": "head", "separate_v_table": true})",
        R"("dtype": "f32", "cache": {"page_size": 16, "separate_v_table": true})"}) {
    const cases::Case spec = tests::make_case(common.with(rest));
    EXPECT_EQ(run(spec, 1, tests::spoil_value_pages), "") << rest;
  }
}

// A block that combined the splits of a row block goes on with other work tiles; slots hold the next ones meanwhile.
// Once with outputs alone, once with sums.
TEST_F(EmulatedPrefillBatches, TasksBehindCutOnes) {
  const std::vector<int64_t> queries(31, 16);
  std::vector<int64_t> keys(31, 16);
  keys[0] = 3000;
  const cases::Row common = cases::Row(R"("heads": [2, 1], "dtype": "bf16", "kv": "dense", "causal": true)")
                                .set("seqlens_q", queries)
                                .set("seqlens_kv", keys);
  for (const char* rest : {R"("head_dim": [128, 128], "lse": false)", R"("head_dim": [40, 40], "sinks": "normal")",
                           R"("head_dim": [64, 64], "dtype": "f16", "lse": false)"}) {
    EXPECT_EQ(run(tests::make_case(common.with(rest)), 1, {}, Twist::kOneBlock), "") << rest;
    EXPECT_EQ(splits_, 1);
  }
}

// More sequences than the schedule has threads, so each thread has several: every row block is listed once.
TEST_F(EmulatedPrefillBatches, MoreSequencesThanThreadsOfTheSchedule) {
  std::vector<int64_t> queries(2100, 1);
  for (size_t b = 0; b < queries.size(); b += 7) queries[b] = 130 + static_cast<int64_t>(b % 5) * 64;
  cases::Problem problem(
      tests::make_case(cases::Row(R"("heads": [1, 1], "head_dim": [64, 64], "dtype": "bf16", "kv": "dense")")
                           .set("seqlens_q", queries)));
  problem.arena().upload();
  const Problem p = make_problem(problem.device(), Data::kRequired);
  const prefill::Config c = prefill::choose_config(p, kBlocks);
  cases::Workspace workspace(cases::host_memory(), c.workspace_bytes());
  const kernels::WorkTileParams params = prefill::to_params(p, c, workspace.buffer.device());
  emulate_schedule(c, params);
  EXPECT_EQ(workspace.buffer.check_guards(), "");
  std::map<std::pair<int, int>, int64_t> listed;  // the first row of a sequence's block, by its first token
  for (int i = 0; i < params.list->num_work_tiles; ++i) {
    const kernels::WorkTile& t = params.work_tiles[i];
    EXPECT_EQ(t.num_splits, 1);
    EXPECT_TRUE(listed.emplace(std::pair(t.batch, t.token_begin), t.q_begin).second) << t.batch << " twice";
  }
  size_t blocks = 0;
  int64_t row = 0;
  for (size_t b = 0; b < queries.size(); row += queries[b++]) {
    for (int64_t token = 0; token < queries[b]; token += c.tokens_of_tile, ++blocks) {
      const auto at = listed.find({static_cast<int>(b), static_cast<int>(token)});
      ASSERT_NE(at, listed.end()) << b << ", " << token;
      EXPECT_EQ(at->second, row) << b;
    }
  }
  EXPECT_EQ(listed.size(), blocks);
}

}  // namespace
}  // namespace attune::cuda
