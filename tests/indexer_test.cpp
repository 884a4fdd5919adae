// SPDX-License-Identifier: Apache-2.0
// The indexer of sparse attention on the CPU: the table of cases, and what holds for every selection.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "cases/indexer_problem.h"
#include "cpu/kernels.h"
#include "indexer_fixture.h"
#include "picked_cases.h"
#include "support.h"

namespace attune::tests {
namespace {

constexpr int kRandomIndexerCases = 150;

std::vector<cases::Case> table() {
  std::vector<cases::Case> list = cases::indexer_cases();
  for (int seed = 0; seed < kRandomIndexerCases; ++seed)
    list.push_back(cases::random_indexer_case(static_cast<uint64_t>(seed)));
  return list;
}

// threads: one for rows alone, several so that keys are split.
void check_table(int32_t threads, size_t step) {
  const ThreadCount pool(threads);
  const std::vector<cases::Case> list = table();
  for (size_t i = 0; i < list.size(); i += step) {
    if (!is_picked(list[i])) continue;
    const cases::Report report = cases::run_case(list[i]);
    EXPECT_TRUE(report.passed()) << list[i].name << ": " << report.failure;
  }
}

TEST(Indexer, MatchesTheOracle) { check_table(1, 1); }
TEST(Indexer, MatchesTheOracleInPieces) { check_table(8, 4); }

TEST(Indexer, MatchesTheOracleOnEveryInstructionSet) {
  int count = 0;
  const char* const* names = cpu::isa_names(&count);
  for (int i = 0; i < count; ++i) {
    ASSERT_TRUE(cpu::force_isa(names[i]));
    check_table(2, 7);
  }
  EXPECT_TRUE(cpu::force_isa(nullptr));
}

TEST(IndexerContents, TablesThatMakeNoSense) {
  for (const Spoilt& spoilt : kSpoilt) {
    cases::IndexerProblem problem(small_case(spoilt.more));
    spoil(problem, spoilt);
    EXPECT_EQ(cases::run_and_check(problem).failure, "") << spoilt.name;
  }
}

// One key is NaN: the rows that see it take it, before any other, and the others do not notice.
TEST(IndexerContents, AVisibleNanIsTaken) {
  const cases::Row common(R"("name": "nan", "kv": "paged", "shared_kv": true, "heads": [3, 1], "head_dim": [32, 32],
      "seqlens_q": [4, 20], "seqlens_kv": [50, 90], "causal": true, "plant": "nan_k", "indexer": {"topk": 1})");
  for (const char* dtype : {"e4m3", "bf16", "f32"}) {
    cases::IndexerProblem problem(make_case(common.set("dtype", dtype)));
    EXPECT_EQ(cases::run_and_check(problem).failure, "") << dtype;
    const std::vector<double> scores = gather_values(problem.device(ATTUNE_INDEXER_SCORES).scores);
    EXPECT_TRUE(std::any_of(scores.begin(), scores.end(), [](double x) { return std::isnan(x); }));
  }
}

// SELECT of one row of scores; positions of a sequence with as many keys.
std::vector<int32_t> select(std::vector<float> scores, int64_t topk, bool causal = false, int32_t* length = nullptr) {
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int32_t> indices(static_cast<size_t>(topk), -7), lengths(1, -7);
  Int32Vector seqused({static_cast<int32_t>(n)});
  attune_indexer op;
  EXPECT_ATTUNE_OK(attune_indexer_init(&op, sizeof(op)));
  op.kind = ATTUNE_INDEXER_SELECT;
  op.form = ATTUNE_INDEX_POSITIONS;
  op.causal = causal ? 1 : 0;
  const int64_t shape[] = {1, n}, out[] = {1, topk}, one = 1;
  op.scores = attune_dense_tensor(scores.data(), ATTUNE_FLOAT32, 2, shape);
  op.indices = attune_dense_tensor(indices.data(), ATTUNE_INT32, 2, out);
  op.topk_length = attune_dense_tensor(lengths.data(), ATTUNE_INT32, 1, &one);
  op.seqused_kv = seqused.tensor();
  EXPECT_EQ(cases::run(op, cases::host_memory()), "");
  if (length != nullptr) *length = lengths[0];
  return indices;
}

TEST(IndexerSelect, OrdersScoresAndBreaksTies) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  using List = std::vector<int32_t>;
  EXPECT_EQ(select({1, 3, 2}, 1), (List{1}));
  EXPECT_EQ(select({1, 3, 2}, 2), (List{1, 2}));  // by position, not by score
  EXPECT_EQ(select({5, 5, 5, 5}, 2), (List{0, 1}));
  EXPECT_EQ(select({0.0f, -0.0f, 0.0f}, 2), (List{0, 1}));
  EXPECT_EQ(select({-0.0f, 0.0f, -0.0f}, 1), (List{0}));
  EXPECT_EQ(select({-1, -2, -kInf, -3}, 3), (List{0, 1, 3}));
  EXPECT_EQ(select({1, kInf, kNan, 2}, 1), (List{2}));
  EXPECT_EQ(select({1, -kNan, kNan, kInf}, 2), (List{1, 2}));
  EXPECT_EQ(select({kNan, 1, kInf, kNan, kNan}, 4), (List{0, 2, 3, 4}));
  EXPECT_EQ(select({1e-45f, 0, -1e-45f}, 1), (List{0}));
  int32_t length = 0;
  EXPECT_EQ(select({-kInf, 2}, 4, true, &length), (List{0, 1, -1, -1}));
  EXPECT_EQ(length, 2);
  EXPECT_EQ(select({}, 2, true, &length), (List{-1, -1}));
  EXPECT_EQ(length, 0);
}

// Enough equal scores to fill a list many times over, in every order of magnitude around its capacity.
TEST(IndexerSelect, LongRunsOfTies) {
  for (const int64_t topk : {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{127}, int64_t{129}, int64_t{4000}}) {
    for (const int32_t threads : {1, 8}) {
      const ThreadCount pool(threads);
      std::vector<float> scores(5000, 1.0f);
      scores[4999] = 2.0f;
      scores[0] = 0.5f;
      const std::vector<int32_t> chosen = select(scores, topk);
      for (int64_t i = 0; i + 1 < topk; ++i) ASSERT_EQ(chosen[static_cast<size_t>(i)], i + 1) << topk;
      EXPECT_EQ(chosen.back(), 4999) << topk;
    }
  }
}

// A score's bits depend on its row and key alone: not on the batch, the threads, or the keys beside it.
TEST(IndexerScores, DoNotDependOnTheirNeighbours) {
  const cases::Row common(R"("name": "alone", "kv": "paged", "shared_kv": true, "heads": [70, 1],
      "head_dim": [72, 72], "queries": "flat", "seqlens_kv": [300, 40, 129], "cache": {"dtype": "bf16"},
      "indexer": {"topk": 9, "clear": true})");
  for (const char* dtype : {"e4m3", "f32"}) {
    cases::IndexerProblem problem(make_case(common.set("dtype", dtype)));
    const attune_indexer all = problem.device(ATTUNE_INDEXER_SCORES);
    ASSERT_EQ(cases::run(all, cases::host_memory()), "");
    const std::vector<std::byte> expected = gather(all.scores);
    const ThreadCount pool(5);
    for (int64_t b = 2; b >= 0; --b) {
      attune_indexer one = all;
      for (attune_tensor* t : {&one.q, &one.weights, &one.scores, &one.seqused_kv, &one.cache.page_table}) {
        *t = rows_of(*t, b, 1);
      }
      cases::for_each_element(one.scores, [](const int64_t*, void* x) { cases::poison(ATTUNE_FLOAT32, x, 1); });
      ASSERT_EQ(cases::run(one, cases::host_memory()), "");
    }
    EXPECT_EQ(gather(all.scores), expected) << dtype;
  }
}

// SCORES and SELECT, of which TOPK is made, take no column that a row does not see; TOPK keeps its scores to itself.
TEST(IndexerErrors, NameWhatIsWrong) {
  cases::IndexerProblem problem(small_case());
  const attune_indexer ops[] = {problem.device(ATTUNE_INDEXER_TOPK), problem.device(ATTUNE_INDEXER_SCORES),
                                problem.device(ATTUNE_INDEXER_SELECT)};
  std::vector<int32_t> table(64, 0);
  const int64_t table_shape[] = {3, 20};
  static attune_tensor slots;
  slots = attune_dense_tensor(table.data(), ATTUNE_INT32, 2, table_shape);
  const auto expect = [&](int kind, void (*spoil)(attune_indexer&), const char* names) {
    attune_indexer op = ops[kind];
    spoil(op);
    size_t bytes = 0;
    // Both calls look at the same things, but for data.
    if (attune_indexer_workspace_size(&op, kCpu, &bytes) == ATTUNE_OK) {
      cases::Workspace workspace(cases::host_memory(), bytes);
      EXPECT_EQ(attune_indexer_run(&op, kCpu, workspace.buffer.device(), bytes, nullptr), ATTUNE_INVALID_ARGUMENT)
          << names;
    }
    EXPECT_NE(std::string(attune_last_error()).find(names), std::string::npos) << attune_last_error();
  };
  using Op = attune_indexer;
  expect(
      0, [](Op& o) { o.struct_size = 8; }, "indexer.struct_size is 8; it must be 2088");
  expect(
      0, [](Op& o) { o.kind = 3; }, "kind is 3; it must be one of attune_indexer_kind (0..2)");
  expect(
      0, [](Op& o) { o.causal = 2; }, "causal is 2; it must be 0 or 1");
  expect(
      1, [](Op& o) { o.clear_scores = -1; }, "clear_scores is -1");
  expect(
      0, [](Op& o) { o.clear_scores = 1; }, "clear_scores is 1, but kind is ATTUNE_INDEXER_TOPK");
  expect(
      0, [](Op& o) { o.form = 2; }, "form is 2; it must be one of attune_index_form (0..1)");
  expect(
      0, [](Op& o) { o.q = {}; }, "q is absent");
  expect(
      0, [](Op& o) { o.q.rank = 2; }, "q.rank is 2; it must be 3 or 4");
  expect(
      0, [](Op& o) { o.q.shape[2] = 577; }, "q has head_dim 577; it must be 1..576");
  expect(
      0, [](Op& o) { o.q.shape[1] = 0; }, "q has 0 heads");
  expect(
      0, [](Op& o) { o.q.shape[2] = 16; }, "cache.k has head_dim 32; it must be 16");
  expect(
      0, [](Op& o) { o.q.data = nullptr; }, "q.data is null");
  expect(
      0, [](Op& o) { o.weights = {}; }, "weights is absent; ATTUNE_INDEXER_TOPK needs it");
  expect(
      1, [](Op& o) { o.weights.shape[1] = 5; }, "weights.shape[1] is 5; it must be 6 (num_heads, as q)");
  expect(
      1, [](Op& o) { o.weights.shape[0] = 5; }, "weights.shape[0] is 5; it must be 8 (as q)");
  expect(
      1, [](Op& o) { o.weights.rank = 3; }, "weights.rank is 3; it must be 2");
  expect(
      0, [](Op& o) { o.q_scale = o.weights, o.q_scale.dtype = ATTUNE_BFLOAT16; }, "q_scale.dtype is bfloat16");
  expect(
      0, [](Op& o) { o.seqused_kv = {}; }, "seqused_kv is absent");
  expect(
      2, [](Op& o) { o.seqused_kv.shape[0] = 2; }, "seqused_kv.shape[0] is 2; it must be 3 (batch)");
  expect(
      0, [](Op& o) { o.key_end = o.seqused_kv; }, "key_end.shape[0] is 3; it must be 8 (total_q)");
  expect(
      0, [](Op& o) { o.cache.k = o.cache.k_scale = o.cache.page_table = {}; }, "cache.k is absent");
  expect(
      0, [](Op& o) { o.cache.v = o.cache.k; }, "cache.v is set; the indexer has no values");
  expect(
      0, [](Op& o) { o.cache.format = ATTUNE_KV_MLA_656; }, "cache.format is 1; index keys are ATTUNE_KV_PLAIN");
  expect(
      0, [](Op& o) { o.cache.ring_capacity = 16; }, "cache.ring_capacity is 16");
  expect(
      0, [](Op& o) { o.cache.page_table.shape[0] = 2; }, "cache.page_table.shape[0] is 2; it must be 3 (batch)");
  expect(
      0, [](Op& o) { o.scores = o.weights; }, "scores is set, but kind is ATTUNE_INDEXER_TOPK");
  expect(
      1, [](Op& o) { o.scores = {}; }, "scores is absent; ATTUNE_INDEXER_SCORES needs it");
  expect(
      1, [](Op& o) { o.scores.stride[0] = 1; }, "an output must not overlap itself");
  expect(
      1, [](Op& o) { o.scores.data = o.weights.data; }, "scores overlaps weights");
  expect(
      1, [](Op& o) { o.indices = o.seqused_kv; }, "indices is set, but kind is ATTUNE_INDEXER_SCORES");
  expect(
      1, [](Op& o) { o.slot_table = slots; }, "slot_table is set, but kind is ATTUNE_INDEXER_SCORES");
  expect(
      2, [](Op& o) { o.q = o.scores; }, "q is set, but kind is ATTUNE_INDEXER_SELECT");
  expect(
      2, [](Op& o) { o.scores.shape[0] = 9; }, "indices.shape[0] is 8; it must be 9 (as scores)");
  expect(
      0, [](Op& o) { o.indices = {}; }, "indices is absent; ATTUNE_INDEXER_TOPK writes it");
  expect(
      0, [](Op& o) { o.indices.dtype = ATTUNE_INT64; }, "indices.dtype is int64");
  expect(
      0, [](Op& o) { o.indices.shape[1] = 0; }, "indices.shape[1] is 0; topk must be at least 1");
  expect(
      0, [](Op& o) { o.topk_length.shape[0] = 3; }, "topk_length.shape[0] is 3; it must be 8 (total_q)");
  expect(
      0, [](Op& o) { o.topk_length.data = o.indices.data; }, "topk_length overlaps indices");
  expect(
      2, [](Op& o) { o.cache = {}; }, "slot_table and cache.k are absent, but form is ATTUNE_INDEX_SLOTS");
  expect(
      0, [](Op& o) { o.slot_pages = 4; }, "slot_page_size is 0 and slot_pages 4, but slot_table is absent");
  expect(
      0, [](Op& o) { o.slot_table = slots; }, "slot_page_size is 0; with slot_table it must be 1..");
  expect(
      0, [](Op& o) { o.slot_table = slots, o.slot_page_size = 16, o.slot_pages = int64_t{1} << 28; },
      "slot_pages is 268435456; with slot_page_size 16 it must be 0..134217728");
  expect(
      0, [](Op& o) { o.max_seqlen_kv = -1; }, "max_seqlen_kv is -1");
  EXPECT_EQ(attune_indexer_run(nullptr, kCpu, nullptr, 0, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_indexer_init(nullptr, sizeof(attune_indexer)), ATTUNE_INVALID_ARGUMENT);
}

TEST(IndexerErrors, WorkspaceIsChecked) {
  cases::IndexerProblem problem(small_case());
  const attune_indexer op = problem.device(ATTUNE_INDEXER_TOPK);
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_indexer_workspace_size(&op, kCpu, &bytes));
  cases::Workspace workspace(cases::host_memory(), bytes + 256);
  auto* at = static_cast<std::byte*>(workspace.buffer.device());
  EXPECT_EQ(attune_indexer_run(&op, kCpu, at, bytes - 1, nullptr), ATTUNE_WORKSPACE_TOO_SMALL);
  EXPECT_NE(std::string(attune_last_error()).find("the indexer needs"), std::string::npos) << attune_last_error();
  EXPECT_EQ(attune_indexer_run(&op, kCpu, nullptr, bytes, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_EQ(attune_indexer_run(&op, kCpu, at + 64, bytes, nullptr), ATTUNE_INVALID_ARGUMENT);
  // Shapes are enough to know the size.
  attune_indexer shapes = op;
  for (auto& [name, tensor] : cases::tensors_of(shapes)) tensor->data = nullptr;
  size_t planned = 0;
  ASSERT_ATTUNE_OK(attune_indexer_workspace_size(&shapes, kCpu, &planned));
  EXPECT_EQ(planned, bytes);
}

// It grows with rows at work and topk, not with rows times keys.
TEST(IndexerMemory, OfALongPromptStaysSmall) {
  attune_indexer op;
  ASSERT_ATTUNE_OK(attune_indexer_init(&op, sizeof(op)));
  const int64_t rows = 32768, keys = 131072;
  const int64_t q[] = {1, rows, 64, 128}, k[] = {1, keys, 1, 128}, w[] = {1, rows, 64}, i[] = {1, rows, 2048}, one = 1;
  op.q = attune_dense_tensor(nullptr, ATTUNE_FLOAT8_E4M3, 4, q);
  op.cache.k = attune_dense_tensor(nullptr, ATTUNE_FLOAT8_E4M3, 4, k);
  op.weights = attune_dense_tensor(nullptr, ATTUNE_FLOAT32, 3, w);
  op.indices = attune_dense_tensor(nullptr, ATTUNE_INT32, 3, i);
  op.seqused_kv = attune_dense_tensor(nullptr, ATTUNE_INT32, 1, &one);
  const ThreadCount pool(8);
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_indexer_workspace_size(&op, kCpu, &bytes));
  EXPECT_LE(bytes, size_t{64} << 20);
}

TEST(IndexerThreads, ShareOneOperation) {
  const ThreadCount pool(2);
  const std::vector<cases::Case>& list = cases::indexer_cases();
  std::vector<std::string> failures(list.size());
  std::vector<std::thread> threads;
  threads.reserve(3);
  std::atomic<size_t> next{0};
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (size_t i = next++; i * 13 < list.size(); i = next++) failures[i] = cases::run_case(list[i * 13]).failure;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < list.size(); ++i) EXPECT_EQ(failures[i], "") << list[i].name;
}

TEST(IndexerThreads, CutLongSequences) {
  const ThreadCount pool(4);
  for (const cases::Case& spec : cases::indexer_cases()) {
    if (spec.name.find("indexer/long/") != 0) continue;
    EXPECT_EQ(cases::run_case(spec).failure, "") << spec.name;
  }
}

}  // namespace
}  // namespace attune::tests
