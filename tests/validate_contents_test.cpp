// SPDX-License-Identifier: Apache-2.0
// Bad lengths, tables and indices: attune_validate names the entry, attune_run masks it as the oracle says.
#include "spoilt_attention.h"
#include "support.h"

namespace attune::tests {
namespace {

using cases::Problem;

// Writes one int32 of a tensor, in the host's bytes and the device's.
void set(Problem& problem, const attune_tensor& host, std::initializer_list<int64_t> index, int32_t value) {
  void* at = cases::element_at(host, index);
  std::memcpy(at, &value, sizeof(value));
  std::memcpy(problem.arena().device_pointer(at), &value, sizeof(value));
}

struct BadContent {
  const char* name;
  const char* row;
  const char* message;  // what attune_validate must say
  void (*spoil)(Problem&);
};

const BadContent kContents[] = {
    {"length_past_the_cache", R"("kv": "paged", "seqlens_kv": [20, 40])", "seqused_kv[1]",
     [](Problem& p) { set(p, p.host().seqused_kv, {1}, 1 << 30); }},
    {"negative_length", R"("kv": "paged", "seqlens_kv": [20, 40])", "seqused_kv[0]",
     [](Problem& p) { set(p, p.host().seqused_kv, {0}, -5); }},
    {"length_past_dense_keys", R"("seqlens_q": [3, 2], "seqlens_kv": [9, 7], "seqused": true)", "seqused_kv[1]",
     [](Problem& p) { set(p, p.host().seqused_kv, {1}, 1000); }},
    {"negative_page", R"("kv": "paged", "seqlens_kv": [20, 40])", "page_table[1][1]",
     [](Problem& p) {
       set(p, p.host().cache.page_table, {1, 1}, -1);
     }},
    {"page_past_the_pool", R"("kv": "paged", "seqlens_kv": [20, 40])", "page_table[0][0]",
     [](Problem& p) {
       set(p, p.host().cache.page_table, {0, 0}, static_cast<int32_t>(p.host().cache.k.shape[0]));
     }},
    {"all_pages_bad", R"("kv": "paged", "seqlens_kv": [20, 10])", "page_table[1][0]",
     [](Problem& p) {
       set(p, p.host().cache.page_table, {1, 0}, 0x7fffff00);
     }},
    {"bad_v_page", R"("kv": "paged", "seqlens_kv": [20, 40], "cache": {"separate_v_table": true})",
     "v_page_table[1][2]",
     [](Problem& p) {
       set(p, p.host().cache.v_page_table, {1, 2}, INT32_MIN);
     }},
    {"page_of_the_new_token",
     R"("kv": "paged", "new_tokens": true, "causal": true, "seqlens_kv": [16, 20], "prologue": {"append": true})",
     "page_table[0][1]",
     [](Problem& p) {
       set(p, p.host().cache.page_table, {0, 1}, -9);
     }},
    {"batch_index", R"("kv": "contiguous", "seqlens_kv": [9, 7], "cache": {"batch_index": true})", "batch_index[1]",
     [](Problem& p) { set(p, p.host().cache.batch_index, {1}, 4); }},
    {"index_past_the_pool", R"("kv": "slots", "seqlens_q": [1, 1], "sparse": {"topk": 9, "invalid": 0})",
     "indices[1][3]",
     [](Problem& p) {
       set(p, p.host().indices, {1, 3}, 1 << 20);
     }},
    {"topk_length_too_long",
     R"("kv": "slots", "seqlens_q": [1, 1], "sparse": {"topk": 9, "invalid": 0, "topk_length": "batch"})",
     "topk_length[0]", [](Problem& p) { set(p, p.host().topk_length, {0}, 10); }},
    {"topk_length_negative",
     R"("kv": "slots", "seqlens_q": [1, 1], "sparse": {"topk": 9, "invalid": 0, "topk_length": "batch"})",
     "topk_length[0]", [](Problem& p) { set(p, p.host().topk_length, {0}, -3); }},
    {"offsets_decrease", R"("seqlens_q": [3, 2, 4], "seqlens_kv": [3, 2, 4])", "cu_seqlens_q[2]",
     [](Problem& p) { set(p, p.host().cu_seqlens_q, {2}, 1); }},
    {"offsets_past_the_end", R"("seqlens_q": [3, 2], "seqlens_kv": [3, 2])", "cu_seqlens_q[2]",
     [](Problem& p) { set(p, p.host().cu_seqlens_q, {2}, 100); }},
    {"key_offsets_decrease", R"("seqlens_q": [3, 2, 4], "seqlens_kv": [9, 9, 9])", "cu_seqlens_kv[2]",
     [](Problem& p) { set(p, p.host().cu_seqlens_kv, {2}, 1); }},
    {"key_offsets_past_the_end", R"("seqlens_q": [3, 2], "seqlens_kv": [9, 9])", "cu_seqlens_kv[2]",
     [](Problem& p) { set(p, p.host().cu_seqlens_kv, {2}, 100); }},
    {"beam", R"("kv": "paged", "seqlens_kv": [9, 9], "beam_width": 2, "beam_prompt": [4, 4])",
     "cache_indirection[0][6]",
     [](Problem& p) {
       set(p, p.host().cache_indirection, {0, 6}, 2);
     }},
    {"negative_beam", R"("kv": "paged", "seqlens_kv": [9, 9], "beam_width": 2, "beam_prompt": [4, 4])",
     "cache_indirection[1][5]",
     [](Problem& p) {
       set(p, p.host().cache_indirection, {1, 5}, -1);
     }},
    {"ia3_task_below_none", R"("kv": "paged", "new_tokens": true, "seqlens_kv": [9, 7], "prologue": {"ia3_tasks": 2})",
     "ia3_task[0]", [](Problem& p) { set(p, p.host().prologue.ia3_task, {0}, -2); }},
    {"first_offset_negative", R"("seqlens_q": [3, 2], "seqlens_kv": [3, 2])", "cu_seqlens_q[0]",
     [](Problem& p) { set(p, p.host().cu_seqlens_q, {0}, -1); }},
    {"ia3_task", R"("kv": "paged", "new_tokens": true, "seqlens_kv": [9, 7], "prologue": {"ia3_tasks": 2})",
     "ia3_task[1]", [](Problem& p) { set(p, p.host().prologue.ia3_task, {1}, 2); }},
    {"rope_position",
     R"("kv": "paged", "new_tokens": true, "seqlens_kv": [9, 7], "prologue": {"rope": {"style": "linear", "dim": 16,
        "positions": 1}})",
     "positions[1]", [](Problem& p) { set(p, p.host().prologue.positions, {1}, 100000); }},
    {"negative_rope_position",
     R"("kv": "paged", "new_tokens": true, "seqlens_kv": [9, 7], "prologue": {"rope": {"style": "linear", "dim": 16,
        "positions": 1}})",
     "positions[0]", [](Problem& p) { set(p, p.host().prologue.positions, {0}, -1); }},
    {"rope_table",
     R"("kv": "paged", "new_tokens": true, "seqlens_kv": [9, 7], "prologue": {"rope": {"style": "linear", "dim": 16,
        "tables": 2}})",
     "rope_table_index[0]", [](Problem& p) { set(p, p.host().prologue.rope_table_index, {0}, 2); }},
    {"bias_of_fewer_keys", R"("seqlens_q": [3, 2], "seqlens_kv": [7, 9], "bias": 2)",
     "sequence 1 has 9 keys; bias.shape[2] is 8 and must be at least that",
     [](Problem& p) { p.host().bias.shape[2] = 8; }},
    {"bias_of_fewer_rows",
     R"("kv": "paged", "new_tokens": true, "seqlens_q": [3, 2], "seqlens_kv": [9, 20], "bias": 1)",
     "sequence 1 has 22 keys; bias.shape[1] is 21", [](Problem& p) { p.host().bias.shape[1] = 21; }},
};

class BadContents : public testing::TestWithParam<BadContent> {};
INSTANTIATE_TEST_SUITE_P(All, BadContents, testing::ValuesIn(kContents),
                         [](const auto& info) { return info.param.name; });

TEST_P(BadContents, AreNamedByValidate) {
  Problem problem(make_case(cases::Row(R"("name": "good", "heads": [4, 2], "poison": false)").with(GetParam().row)));
  attune_attention a = problem.device();
  EXPECT_ATTUNE_OK(attune_validate(&a, kCpu, nullptr));
  GetParam().spoil(problem);
  a = problem.device();
  EXPECT_EQ(attune_validate(&a, kCpu, nullptr), ATTUNE_BAD_DATA);
  EXPECT_NE(std::string(attune_last_error()).find(GetParam().message), std::string::npos) << attune_last_error();
}

TEST_P(BadContents, AreMaskedByRun) {
  const cases::Row common(R"("name": "bad", "heads": [4, 2], "max_logits": true)");
  for (const char* dtype : {"f32", "bf16"}) {
    Problem problem(make_case(common.set("dtype", dtype).with(GetParam().row)));
    GetParam().spoil(problem);
    const cases::Expected expected = cases::evaluate(problem);
    plan_and_run(problem.device());
    const cases::Report report = cases::compare(problem, expected);
    EXPECT_EQ(report.failure, "") << dtype;
  }
}

// What looks like a mistake and is none: a run does what is documented, and validate agrees.
const BadContent kOddContents[] = {
    {"no_ia3_task", R"("kv": "paged", "new_tokens": true, "seqlens_kv": [9, 7], "prologue": {"ia3_tasks": 2})", "",
     [](Problem& p) { set(p, p.host().prologue.ia3_task, {1}, -1); }},
    {"offsets_begin_late", R"("seqlens_q": [3, 2], "seqlens_kv": [3, 2])", "",
     [](Problem& p) { set(p, p.host().cu_seqlens_q, {0}, 2); }},
    {"offsets_of_new_tokens_begin_late",
     R"("kv": "paged", "new_tokens": true, "causal": true, "seqlens_q": [3, 2], "seqlens_kv": [9, 7],
        "prologue": {"append": true})",
     "", [](Problem& p) { set(p, p.host().cu_seqlens_q, {0}, 1); }},
    {"key_offsets_begin_late", R"("seqlens_q": [3, 2], "seqlens_kv": [9, 9])", "",
     [](Problem& p) { set(p, p.host().cu_seqlens_kv, {0}, 4); }},
    {"full_cache_of_a_skipped_sequence",
     R"("kv": "paged", "new_tokens": true, "causal": true, "skip_decode": true, "seqlens_q": [3, 1],
        "seqlens_kv": [9, 7], "prologue": {"append": true})",
     "",
     [](Problem& p) {
       const attune_kv_cache& cache = p.host().cache;
       set(p, p.host().seqused_kv, {1}, static_cast<int32_t>(cache.page_table.shape[1] * cache.k.shape[1]));
       for (int64_t i = 0; i < cache.page_table.shape[1]; ++i) {
         set(p, cache.page_table, {1, i}, 0);
       }
     }},
    {"bias_of_fewer_keys_than_a_sequence_without_queries", R"("seqlens_q": [3, 0], "seqlens_kv": [7, 9], "bias": 2)",
     "", [](Problem& p) { p.host().bias.shape[1] = p.host().bias.shape[2] = 7; }},
};

class OddContents : public testing::TestWithParam<BadContent> {};
INSTANTIATE_TEST_SUITE_P(All, OddContents, testing::ValuesIn(kOddContents),
                         [](const auto& info) { return info.param.name; });

TEST_P(OddContents, AreFine) {
  Problem problem(make_case(cases::Row(R"("name": "odd", "heads": [4, 2])").with(GetParam().row)));
  GetParam().spoil(problem);
  const attune_attention a = problem.device();
  EXPECT_ATTUNE_OK(attune_validate(&a, kCpu, nullptr));
  const cases::Expected expected = cases::evaluate(problem);
  plan_and_run(a);
  EXPECT_EQ(cases::compare(problem, expected).failure, "");
}

// Latent caches and lists, of which everything is wrong at once.
TEST(BadLatentContents, AreMaskedByRun) {
  for (const SpoiltCase& spoilt : spoilt_mla_cases()) {
    Problem problem(spoilt.spec);
    spoilt.spoil(problem);
    problem.arena().upload();
    const attune_attention a = problem.device();
    const bool is_allowed = spoilt.spec.name.find("many times") != std::string::npos;
    EXPECT_EQ(attune_validate(&a, kCpu, nullptr), is_allowed ? ATTUNE_OK : ATTUNE_BAD_DATA) << spoilt.spec.name;
    const cases::Expected expected = cases::evaluate(problem);
    plan_and_run(a);
    EXPECT_EQ(cases::compare(problem, expected).failure, "") << spoilt.spec.name;
  }
}

}  // namespace
}  // namespace attune::tests
