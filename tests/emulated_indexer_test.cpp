// SPDX-License-Identifier: Apache-2.0
// The indexer's kernels, their own sources, on the CPU (tests/emulator): what they compute, against the oracle, with
// poisoned memory, without a GPU.
#include <algorithm>
#include <bit>
#include <limits>
#include <sstream>

#include "cuda/indexer/config.h"
#include "cuda/indexer/params.h"
#include "emulated.h"
#include "far.h"
#include "indexer_fixture.h"
#include "selection_fixture.h"

namespace attune::cuda {
namespace {

constexpr uint64_t kRandomCases = 100;

struct Device {
  int blocks = 3;    // of the scores' grid, so that each takes several units
  int64_t rows = 0;  // of a launch; 0: as many as the workspace has room for
  indexer::SelectConfig select = {.threads = 128, .bits = 11, .candidates = 128, .mark_words = 32};
  Target target = {};
};

template <class Params>
void launch(const KernelSpec& spec, unsigned blocks, int threads, const Params& params, int cluster = 1) {
  const auto entry = reinterpret_cast<void (*)(Params)>(emulator::find_kernel(spec));
  emulator::run(
      blocks, static_cast<unsigned>(threads), [&] { entry(params); }, static_cast<unsigned>(cluster));
}

// As src/cuda/indexer/indexer.cpp does.
void run_kernels(const IndexerProblem& op, indexer::Layout layout, void* workspace, const Device& d) {
  if (d.rows > 0) layout.rows = std::min(layout.rows, d.rows);
  if (op.cu) {
    launch(indexer::owners_kernel(), 1, indexer::kOwnersThreads,
           indexer::index_rows(op, layout, workspace, 0, op.total_q));
  }
  for (int64_t first = 0; first < op.total_q; first += layout.rows) {
    const int64_t count = std::min(layout.rows, op.total_q - first);
    if (op.reads_keys()) {
      const indexer::ScoresConfig c = indexer::choose_scores(op, d.target);
      const auto params = indexer::scores_params(op, c, layout, workspace, first, count, 1);
      if (params.num_tiles > 0) launch(c.kernel(), static_cast<unsigned>(d.blocks), c.threads(), params);
    }
    if (op.selects()) {
      launch(d.select.kernel(), static_cast<unsigned>(count * d.select.cluster), d.select.threads,
             indexer::select_params(op, layout, workspace, first, count), d.select.cluster);
    }
  }
}

std::string run_emulated(const attune_indexer& a, const Device& d = {}) {
  const IndexerProblem op = make_indexer(a, Data::kRequired);
  const indexer::Layout layout = indexer::make_layout(op);
  cases::Workspace workspace(cases::host_memory(), layout.total);
  try {
    if (op.total_q > 0 && op.batch > 0) run_kernels(op, layout, workspace.buffer.device(), d);
  } catch (const std::exception& e) {
    return e.what();
  }
  return workspace.buffer.check_guards();
}

std::string check(cases::IndexerProblem& problem, const Device& d = {}) {
  return cases::run_and_check(problem, [&](const attune_indexer& a) { return run_emulated(a, d); }).failure;
}

std::string check(const cases::Case& spec, const Device& d = {}) {
  cases::IndexerProblem problem(spec);
  return check(problem, d);
}

std::string check(const cases::Row& row, const Device& d = {}) { return check(tests::make_case(row), d); }

cases::Row row_with(std::string_view members) {
  return cases::Row(R"("kv": "paged", "shared_kv": true)").with(members);
}

std::string check(std::string_view members, const Device& d = {}) { return check(row_with(members), d); }

TEST(IndexerDivisor, IsExactBelowTwoToThe31) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  std::vector<int64_t> divisors = {1, 2, 3, 5, 7, 48, 100, 641, 65535, 65537, kMost - 1, kMost, kMost + 1};
  for (int bit = 2; bit < 31; ++bit) {
    for (const int64_t near : {-1, 0, 1}) divisors.push_back((int64_t{1} << bit) + near);
  }
  for (const int64_t d : divisors) {
    const kernels::Divisor by = kernels::make_divisor(d);
    for (int64_t q = 0; q <= kMost / d; q = q < 3 ? q + 1 : q * 3 / 2 + 1) {
      for (const int64_t a : {q * d - 1, q * d, q * d + 1}) {
        if (a < 0 || a > kMost) continue;
        ASSERT_EQ(kernels::divide(a, by), a / d) << a << " / " << d;
      }
    }
    for (int64_t a = kMost; a > kMost - 1000; --a) ASSERT_EQ(kernels::divide(a, by), a / d) << a << " / " << d;
  }
}

class EmulatedIndexer : public tests::Emulated {};

cases::Row deep_seek(std::string_view members) {
  return row_with(R"("heads": [64, 1], "head_dim": [128, 128], "dtype": "e4m3",
      "cache": {"dtype": "e4m3", "scales": "token", "page_size": 64})")
      .with(members);
}

TEST_F(EmulatedIndexer, Decode) {
  EXPECT_EQ(check(deep_seek(R"("seqlens_kv": [700, 0, 1, 64, 65, 300],
      "indexer": {"topk": 64, "q_scale": true})")),
            "");
  EXPECT_EQ(check(deep_seek(R"("queries": "fixed", "causal": true, "seqlens_q": 3,
      "seqlens_kv": [600, 4], "indexer": {"topk": 128}, "max_seqlens": true)")),
            "");
}

// Scores without wgmma; a row of keys without clusters.
TEST_F(EmulatedIndexer, OnAmpere) {
  const emulator::Capability ampere(80);
  const Device device{.target = own_target(80)};
  EXPECT_EQ(check(deep_seek(R"("seqlens_kv": [700, 0, 1, 64, 65, 300],
      "indexer": {"topk": 64, "q_scale": true})"),
                  device),
            "");
  EXPECT_EQ(check(R"("heads": [16, 1], "head_dim": [64, 64], "dtype": "bf16", "cache": {"dtype": "bf16",
      "page_size": 64}, "causal": true, "seqlens_q": [9, 0, 1], "seqlens_kv": [300, 50, 200],
      "indexer": {"topk": 60})",
                  device),
            "");
  cases::IndexerProblem one(tests::make_case(deep_seek(R"("seqlens_kv": [70000], "indexer": {"topk": 64})")));
  const IndexerProblem op = make_indexer(one.host(ATTUNE_INDEXER_TOPK), Data::kOptional);
  EXPECT_GT(indexer::choose_select(op, 1, 132).cluster, 1);
  EXPECT_EQ(indexer::choose_select(op, 1, 132, device.target).cluster, 1);
}

// The scheduler looks at 32 tiles of a block at a time.
TEST_F(EmulatedIndexer, ManyTilesOfABlock) {
  EXPECT_EQ(check(deep_seek(R"("causal": true, "seqlens_q": [9, 1, 3], "seqlens_kv": [1900, 2000, 1300],
      "indexer": {"topk": 64, "q_scale": true})"),
                  {.blocks = 1}),
            "");
}

TEST_F(EmulatedIndexer, PrefillInChunksOfRows) {
  for (const int64_t rows : {0, 20}) {
    EXPECT_EQ(check(R"("heads": [16, 1], "head_dim": [64, 64], "dtype": "e4m3", "cache": {"dtype": "e4m3",
        "scales": "token", "page_size": 64}, "causal": true, "seqlens_q": [40, 0, 1, 13],
        "seqlens_kv": [300, 50, 200, 13], "window": [90, 3], "indexer": {"topk": 60})",
                    {.rows = rows}),
              "")
        << rows;
  }
}

TEST_F(EmulatedIndexer, Types) {
  const char* caches[] = {R"("cache": {"dtype": "f32"})",
                          R"("cache": {"dtype": "f16"})",
                          R"("cache": {"dtype": "bf16"})",
                          R"("cache": {"dtype": "e4m3", "scales": "token"})",
                          R"("cache": {"dtype": "e5m2", "scales": "tensor"})",
                          R"("cache": {"dtype": "i8", "scales": "head"})"};
  const struct {
    const char* q;
    int cache;
  } pairs[] = {{"f32", 3}, {"f16", 1}, {"bf16", 2}, {"bf16", 4}, {"e5m2", 1}, {"i8", 5}, {"f16", 2}};
  const cases::Row common = row_with(R"("heads": [5, 1], "head_dim": [80, 80], "causal": true, "seqlens_q": [3, 9],
      "seqlens_kv": [200, 70], "indexer": {"topk": 33, "q_scale": true})");
  for (const auto& [q, cache] : pairs) {
    EXPECT_EQ(check(common.set("dtype", q).with(caches[cache])), "") << q << " " << caches[cache];
  }
}

TEST_F(EmulatedIndexer, HeadsAndDims) {
  for (const char* shape : {R"("heads": [7, 1], "head_dim": [40, 40])", R"("heads": [65, 1], "head_dim": [128, 128])",
                            R"("heads": [130, 1], "head_dim": [1, 1])", R"("heads": [33, 1], "head_dim": [576, 576])",
                            R"("heads": [20, 1], "head_dim": [192, 192])"}) {
    EXPECT_EQ(check(row_with(R"("dtype": "bf16", "seqlens_kv": [260, 40], "seqlens_q": [2, 1],
        "cache": {"dtype": "e4m3", "scales": "token"}, "indexer": {"topk": 50, "weights": "bf16"})")
                        .with(shape)),
              "")
        << shape;
  }
}

TEST_F(EmulatedIndexer, Layouts) {
  for (const char* rest :
       {R"("cache": {"dtype": "e4m3", "page_size": 3})", R"("cache": {"dtype": "e4m3", "layout": "xpacked"})",
        R"("cache": {"dtype": "bf16", "page_size": 100, "page_padding": true})",
        R"("cache": {"dtype": "e4m3", "share_prefix": true}, "strides": "odd")"}) {
    EXPECT_EQ(check(row_with(R"("heads": [8, 1], "head_dim": [64, 64], "dtype": "e4m3", "seqlens_kv": [333, 90, 1],
        "seqlens_q": [1, 4, 1], "causal": true, "indexer": {"topk": 77})")
                        .with(rest)),
              "")
        << rest;
  }
}

TEST_F(EmulatedIndexer, SlotsOfAnotherCache) {
  for (const char* rest : {R"("indexer": {"topk": 40, "slot_page_size": 48})",
                           R"("indexer": {"topk": 40, "slot_page_size": 16, "bad_pages": true})",
                           R"("indexer": {"topk": 40, "slot_page_size": 4, "bad_pages": true})",
                           R"("indexer": {"topk": 500, "slot_page_size": 16, "bad_pages": true})",
                           R"("indexer": {"topk": 40, "lengths": false, "clear": true})",
                           R"("indexer": {"topk": 40, "slot_page_size": 16, "bad_pages": true, "positions": true})"}) {
    EXPECT_EQ(check(row_with(R"("heads": [4, 1], "head_dim": [64, 64], "dtype": "e4m3", "cache": {"dtype": "e4m3",
        "scales": "token"}, "seqlens_q": [1, 6], "seqlens_kv": [200, 150], "causal": true)")
                        .with(rest)),
              "")
        << rest;
  }
}

// More equal scores than there is room for candidates, and than can be marked at a time.
TEST_F(EmulatedIndexer, Ties) {
  const cases::Row common = row_with(R"("heads": [3, 1], "head_dim": [64, 64], "dtype": "bf16", "seqlens_q": [1, 20],
      "seqlens_kv": [1000, 300], "causal": true, "data": "equal")");
  for (const int topk : {1, 129, 999}) {
    EXPECT_EQ(check(common.set("indexer.topk", topk),
                    {.select = {.threads = 128, .cluster = topk == 129 ? 2 : 1, .candidates = 128, .mark_words = 16}}),
              "")
        << topk;
  }
}

TEST_F(EmulatedIndexer, LongRowsByOneBlockAndByClusters) {
  const cases::Row common =
      row_with(R"("heads": [2, 1], "head_dim": [64, 64], "dtype": "e4m3", "cache": {"dtype": "e4m3",
      "scales": "token", "page_size": 64}, "queries": "fixed", "seqlens_q": 2, "causal": true,
      "seqlens_kv": [9000, 5])");
  for (const int cluster : {1, 4}) {
    const int topk = cluster == 1 ? 300 : 2048;
    const indexer::SelectConfig select = {.threads = 128, .cluster = cluster, .candidates = 512, .mark_words = 512};
    EXPECT_EQ(check(common.set("indexer.topk", topk), {.select = select}), "") << cluster;
  }
}

TEST_F(EmulatedIndexer, TablesThatMakeNoSense) {
  for (const tests::Spoilt& spoilt : tests::kSpoilt) {
    cases::IndexerProblem problem(tests::small_case(spoilt.more));
    tests::spoil(problem, spoilt);
    EXPECT_EQ(check(problem), "") << spoilt.name;
  }
}

TEST_F(EmulatedIndexer, PagesAndRowsThatLieFarApart) {
  const tests::Reservation far;
  if (far.data() == nullptr) GTEST_SKIP() << "this machine does not reserve " << tests::kFarMemory << " bytes";
  const auto run = [](const attune_indexer& op) { return run_emulated(op); };
  EXPECT_EQ(tests::find_near_sighted_indexer(cases::host_memory(), far.data(), run), "");
}

// More sequences than the block has threads, with offsets that go back and forth.
TEST_F(EmulatedIndexer, OwnersOfRows) {
  constexpr int64_t kBatch = 2500, kRows = 400;
  cases::Random random("owners", 1);
  std::vector<int32_t> cu(kBatch + 1);
  for (size_t b = 0; b < cu.size(); ++b) cu[b] = static_cast<int32_t>(b) / 10 - (random.chance(0.1) ? 70 : 0);
  cu[1023] = 150;
  std::vector<int32_t> expected(kRows, -1), offsets(kBatch + 1), owners(kRows);
  int64_t end = 0;
  for (int64_t b = 0; b <= kBatch; ++b) {
    const int64_t begin = end;
    end = std::clamp<int64_t>(cu[static_cast<size_t>(b)], end, kRows);
    if (b > 0) std::fill(expected.begin() + begin, expected.begin() + end, static_cast<int32_t>(b - 1));
  }
  kernels::IndexRows rows{};
  rows.total = kRows, rows.batch = kBatch;
  rows.cu_seqlens = {cu.data(), 0, 1};
  rows.offsets = offsets.data(), rows.owners = owners.data();
  launch(indexer::owners_kernel(), 1, indexer::kOwnersThreads, rows);
  EXPECT_EQ(owners, expected);
}

TEST_F(EmulatedIndexer, AVisibleNanIsTaken) {
  for (const char* dtype : {"e4m3", "bf16", "f32"}) {
    EXPECT_EQ(check(row_with(R"("heads": [1, 1], "head_dim": [32, 32], "seqlens_q": [4, 20], "seqlens_kv": [50, 90],
        "causal": true, "plant": "nan_k", "indexer": {"topk": 1})")
                        .set("dtype", dtype)),
              "")
        << dtype;
  }
}

// SELECT of one row of scores, `step` apart, from key `begin` on; positions of a sequence with as many keys.
std::vector<int32_t> select(const std::vector<float>& scores, int64_t topk, const Device& d = {}, int64_t begin = 0,
                            int64_t step = 1, std::vector<int32_t> slot_pages = {}) {
  const auto n = static_cast<int64_t>(scores.size());
  // Of its own allocation, with nothing behind the last score, and what must not be chosen between and before.
  std::vector<float> spread(static_cast<size_t>(n * step - step + 1), std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = begin; i < n; ++i) spread[static_cast<size_t>(i * step)] = scores[static_cast<size_t>(i)];
  std::vector<int32_t> indices(static_cast<size_t>(topk), -7);
  tests::Int32Vector seqused({static_cast<int32_t>(n)});
  attune_indexer op;
  EXPECT_EQ(attune_indexer_init(&op, sizeof(op)), ATTUNE_OK);
  op.kind = ATTUNE_INDEXER_SELECT;
  op.form = ATTUNE_INDEX_POSITIONS;
  const int64_t shape[] = {1, n}, out[] = {1, topk};
  op.scores = attune_dense_tensor(spread.data(), ATTUNE_FLOAT32, 2, shape);
  op.scores.stride[0] = n * step, op.scores.stride[1] = step;
  op.indices = attune_dense_tensor(indices.data(), ATTUNE_INT32, 2, out);
  op.seqused_kv = seqused.tensor();
  tests::Int32Vector first({static_cast<int32_t>(begin)});
  if (begin > 0) op.key_begin = first.tensor();
  if (!slot_pages.empty()) {
    const int64_t pages[] = {1, static_cast<int64_t>(slot_pages.size())};
    op.form = ATTUNE_INDEX_SLOTS;
    op.slot_table = attune_dense_tensor(slot_pages.data(), ATTUNE_INT32, 2, pages);
    op.slot_page_size = n / pages[1];
    op.slot_pages = 100;
  }
  EXPECT_EQ(run_emulated(op, d), "");
  return indices;
}

TEST_F(EmulatedIndexer, OrdersScoresAndBreaksTies) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  using List = std::vector<int32_t>;
  EXPECT_EQ(select({1, 3, 2}, 2), (List{1, 2}));
  EXPECT_EQ(select({5, 5, 5, 5}, 2), (List{0, 1}));
  EXPECT_EQ(select({-0.0f, 0.0f, -0.0f}, 1), (List{0}));
  EXPECT_EQ(select({-1, -2, -kInf, -3}, 3), (List{0, 1, 3}));
  EXPECT_EQ(select({-kInf, -kInf, 1}, 2), (List{0, 2}));
  EXPECT_EQ(select({1, -kNan, kNan, kInf}, 2), (List{1, 2}));
  EXPECT_EQ(select({kNan, 1, kInf, kNan, kNan}, 4), (List{0, 2, 3, 4}));
  EXPECT_EQ(select({1e-45f, 0, -1e-45f}, 1), (List{0}));
  EXPECT_EQ(select({2, 1}, 4), (List{0, 1, -1, -1}));
}

// Ties that are not chosen write nowhere, whoever writes last.
TEST_F(EmulatedIndexer, TiesOverwriteNoOther) {
  std::vector<float> scores(900);
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = i % 7 == 6 ? 2.0f : 1.0f;
  const std::vector<int32_t> expected = tests::expected_choice(scores, 0, 140);
  EXPECT_EQ(select(scores, 140), expected);
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const emulator::Shuffled shuffled(seed);
    EXPECT_EQ(select(scores, 140), expected) << seed;
  }
}

std::string select_and_check(const std::vector<float>& scores, int64_t topk, const Device& d, int64_t begin = 0,
                             int64_t step = 1) {
  const std::vector<int32_t> expected =
      tests::expected_choice(scores, static_cast<size_t>(begin), static_cast<size_t>(topk));
  if (select(scores, topk, d, begin, step) == expected) return "";
  std::ostringstream where;
  where << "keys " << scores.size() << " topk " << topk << " begin " << begin << " step " << step << " cluster "
        << d.select.cluster;
  return where.str();
}

// 128 threads read 1024 keys at a time, and a block marks 1024 or 4096.
constexpr indexer::SelectConfig kSmallSelects[] = {
    {.threads = 128, .vectors = 2, .bits = 11, .candidates = 64, .mark_words = 32},
    {.threads = 128, .cluster = 2, .vectors = 2, .bits = 11, .candidates = 2048, .mark_words = 128},
    {.threads = 128, .cluster = 4, .vectors = 2, .candidates = 256, .mark_words = 32}};

// Rows that can be marked at once and that cannot, with more and fewer candidates than there is room for.
TEST_F(EmulatedIndexer, SelectsFromAnyDistribution) {
  cases::Random random("select", 1);
  for (const indexer::SelectConfig& config : kSmallSelects) {
    const int64_t span = 32 * config.mark_words * config.cluster;
    for (const tests::Distribution& d : tests::kDistributions) {
      for (const int64_t keys : {int64_t{1025}, span, span + 1}) {
        std::vector<float> scores(static_cast<size_t>(keys));
        for (size_t i = 0; i < scores.size(); ++i) scores[i] = d.score(i, random);
        for (const int64_t topk : {int64_t{1}, random.integer(2, keys / 2)})
          EXPECT_EQ(select_and_check(scores, topk, {.select = config}), "") << d.name;
      }
    }
  }
}

// Rows of a tensor begin anywhere in 16 bytes, their keys anywhere in the row, and columns may lie apart; blocks of a
// cluster may have no column.
TEST_F(EmulatedIndexer, SelectsFromAnyPlace) {
  cases::Random random("place", 1);
  for (const indexer::SelectConfig& config : {kSmallSelects[0], kSmallSelects[2]}) {
    for (const int64_t keys : {1, 5, 127, 129, 640, 1500}) {
      for (const int64_t begin : {0, 1, 2, 3, 97}) {
        if (begin >= keys) continue;
        std::vector<float> scores(static_cast<size_t>(keys));
        for (float& x : scores) x = static_cast<float>(random.integer(0, 50));
        for (const int64_t topk : {int64_t{1}, keys - begin - 1, keys + 3}) {
          if (topk < 1) continue;
          const int64_t step = random.chance(0.3) ? 3 : 1;
          EXPECT_EQ(select_and_check(scores, topk, {.select = config}, begin, step), "");
        }
      }
    }
  }
}

// A page of the slots is bad while all others are good.
TEST_F(EmulatedIndexer, ABadSlotPageHidesItsKeys) {
  const std::vector<float> scores = {1, 2, 9, 9, 5, 6, 7, 8};
  EXPECT_EQ(select(scores, 3, {}, 0, 1, {3, -1, 0, 1}), (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(select(scores, 7, {}, 0, 1, {3, 100, 0, 1}), (std::vector<int32_t>{6, 7, 0, 1, 2, 3, -1}));
  EXPECT_EQ(select(scores, 8, {}, 0, 1, {3, 99, 0, -1}), (std::vector<int32_t>{6, 7, 198, 199, 0, 1, -1, -1}));
}

// More are chosen than can be on their way out at a time.
TEST_F(EmulatedIndexer, ChoosesNearlyAll) {
  cases::Random random("all", 1);
  std::vector<float> scores(7000);
  for (float& x : scores) x = static_cast<float>(random.normal());
  for (indexer::SelectConfig config : kSmallSelects) {
    if (config.cluster == 1) config.mark_words = 256;  // all in one span
    for (const int64_t topk : {6999, 7000, 7001}) EXPECT_EQ(select_and_check(scores, topk, {.select = config}), "");
  }
}

// Ranks that differ in the last digit only, with each of the specialisations that the host chooses.
TEST_F(EmulatedIndexer, NeighbouringScores) {
  std::vector<float> scores(3000);
  for (size_t i = 0; i < scores.size(); ++i) {
    const auto bits = 0x3f800000u + static_cast<uint32_t>(i * 7919 % 3000);
    scores[i] = std::bit_cast<float>(bits);
  }
  std::vector<int32_t> expected;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (i * 7919 % 3000 >= 3000 - 700) expected.push_back(static_cast<int32_t>(i));
  }
  for (const int64_t keys : {int64_t{1000}, int64_t{100000}}) {
    IndexerProblem op;
    op.max_seqlen_kv = keys;
    for (const int64_t rows : {1, 1000})
      EXPECT_EQ(select(scores, 700, {.select = indexer::choose_select(op, rows, 132)}), expected)
          << keys << " " << rows;
  }
}

TEST_F(EmulatedIndexer, HasNoRaces) {
  const emulator::Watched watched;
  for (const uint64_t seed : {1, 2}) {
    const emulator::Shuffled shuffled(seed);
    EXPECT_EQ(check(deep_seek(R"("seqlens_kv": [700, 0, 1, 65], "indexer": {"topk": 64})")), "");
    EXPECT_EQ(check(R"("heads": [16, 1], "head_dim": [64, 64], "dtype": "f32", "cache": {"dtype": "f32"},
        "causal": true, "seqlens_q": [20, 1], "seqlens_kv": [300, 50], "indexer": {"topk": 60})"),
              "");
    cases::Random random("races", seed);
    std::vector<float> scores(9000);
    for (float& x : scores) x = static_cast<float>(random.normal());
    for (const indexer::SelectConfig& config : kSmallSelects)
      EXPECT_EQ(select_and_check(scores, 500, {.select = config}), "");
  }
}

TEST_F(EmulatedIndexer, MatchesTheOracleOnTheTable) {
  std::vector<cases::Case> list = cases::indexer_cases();
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) list.push_back(cases::random_indexer_case(seed));
  check_table(list, 0, [](const cases::Case& spec) { return check(spec); });
}

}  // namespace
}  // namespace attune::cuda
