// SPDX-License-Identifier: Apache-2.0
// The indexer on a GPU: the table of cases against the oracle with poisoned memory, graphs, rows of 128k keys, and what
// holds whatever the batch.
#include <algorithm>
#include <limits>
#include <random>

#include "cases/cuda_memory.h"
#include "core/indexer.h"
#include "cuda/indexer/indexer.h"
#include "cuda_fixture.h"
#include "indexer_fixture.h"
#include "picked_cases.h"
#include "selection_fixture.h"

namespace attune::cuda {
namespace {

using namespace attune::tests;  // NOLINT: the fixtures of the tests of the CPU
constexpr int kRandomIndexerCasesOnCuda = 300;

class CudaIndexer : public CudaFixture {
 protected:
  static std::vector<cases::Case> table() {
    std::vector<cases::Case> list = cases::indexer_cases();
    for (int seed = 0; seed < kRandomIndexerCasesOnCuda; ++seed)
      list.push_back(cases::random_indexer_case(static_cast<uint64_t>(seed)));
    keep_picked(list);
    return list;
  }
};

constexpr attune_indexer_kind kKinds[] = {ATTUNE_INDEXER_SCORES, ATTUNE_INDEXER_SELECT, ATTUNE_INDEXER_TOPK};

TEST_F(CudaIndexer, MatchesTheOracle) {
  const std::vector<cases::Case> list = table();
  const DeviceInfo& device = tested_device();
  std::vector<KernelSpec> specs;
  for (const cases::Case& spec : list) {
    const cases::IndexerProblem problem(spec);
    for (const attune_indexer_kind kind : kKinds) {
      for (KernelSpec& kernel :
           kernels_of(make_indexer(problem.host(kind), Data::kRequired), device.num_sms, device.target))
        specs.push_back(std::move(kernel));
    }
  }
  warm_or_precompile(specs);
  if (precompiles()) return;
  cases::CudaMemory memory(kDevice);
  for (const cases::Case& spec : list) EXPECT_EQ(cases::run_indexer_case(spec, memory).failure, "") << spec.name;
}

TEST_F(CudaIndexer, TablesThatMakeNoSense) {
  cases::CudaMemory memory(kDevice);
  for (const Spoilt& spoilt : kSpoilt) {
    cases::IndexerProblem problem(small_case(spoilt.more), memory);
    spoil(problem, spoilt);
    EXPECT_EQ(cases::run_and_check(problem).failure, "") << spoilt.name;
  }
}

TEST_F(CudaIndexer, AVisibleNanIsTaken) {
  cases::CudaMemory memory(kDevice);
  const cases::Row common(R"("name": "nan", "kv": "paged", "shared_kv": true, "heads": [3, 1], "head_dim": [32, 32],
      "seqlens_q": [4, 20], "seqlens_kv": [50, 90], "causal": true, "plant": "nan_k", "indexer": {"topk": 1})");
  for (const char* dtype : {"e4m3", "bf16", "f32"}) {
    EXPECT_EQ(cases::run_indexer_case(make_case(common.set("dtype", dtype)), memory).failure, "") << dtype;
  }
}

// An operation on device memory, with a workspace of its own.
class Operation {
 public:
  Operation(const attune_indexer& op, const Stream& stream) : op_(op), stream_(stream) {
    size_t bytes = 0;
    EXPECT_ATTUNE_OK(attune_indexer_workspace_size(&op_, kGpu, &bytes));
    workspace_ = DeviceMemory(kDevice, bytes);
  }
  void run() const {
    EXPECT_ATTUNE_OK(attune_indexer_run(&op_, kGpu, workspace_.data(), workspace_.bytes(), stream_.handle()));
  }

 private:
  static constexpr attune_device kGpu = {ATTUNE_DEVICE_CUDA, kDevice};
  attune_indexer op_;
  const Stream& stream_;
  DeviceMemory workspace_;
};

attune_tensor tensor(const DeviceMemory& memory, attune_dtype dtype, std::vector<int64_t> shape) {
  return attune_dense_tensor(memory.data(), dtype, static_cast<int32_t>(shape.size()), shape.data());
}

// The shapes of DeepSeek V3.2 with random codes: rows queries of one sequence, causal.
struct LongProblem {
  static constexpr int64_t kHeads = 64, kDim = 128, kPage = 64, kTopk = 2048;
  const Stream& stream;
  int64_t rows, keys;
  DeviceMemory q, weights, k, k_scale, table, seqused, scores, indices, selected, lengths;

  LongProblem(const Stream& s, int64_t rows, int64_t keys) : stream(s), rows(rows), keys(keys) {
    std::mt19937 random(5);
    const auto bytes = [&](int64_t n) {
      std::vector<uint8_t> x(static_cast<size_t>(n));
      for (uint8_t& byte : x) byte = static_cast<uint8_t>((random() & 0x80) | (0x28 + random() % 0x18));
      return to_device(stream, x);
    };
    const auto floats = [&](int64_t n) {
      std::vector<float> x(static_cast<size_t>(n));
      std::normal_distribution<float> normal;
      for (float& f : x) f = normal(random);
      return to_device(stream, x);
    };
    std::vector<int32_t> pages(static_cast<size_t>(keys / kPage));
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i);
    std::shuffle(pages.begin(), pages.end(), random);
    q = bytes(rows * kHeads * kDim), k = bytes(keys * kDim);
    weights = floats(rows * kHeads), k_scale = floats(keys);
    table = to_device(stream, pages), seqused = to_device(stream, std::vector<int32_t>{static_cast<int32_t>(keys)});
    scores = DeviceMemory(kDevice, static_cast<size_t>(rows * keys * 4));
    indices = DeviceMemory(kDevice, static_cast<size_t>(rows * kTopk * 4));
    selected = DeviceMemory(kDevice, static_cast<size_t>(rows * kTopk * 4));
    lengths = DeviceMemory(kDevice, static_cast<size_t>(rows * 4));
    stream.synchronize();
  }

  attune_indexer operation(attune_indexer_kind kind) const {
    attune_indexer op;
    EXPECT_ATTUNE_OK(attune_indexer_init(&op, sizeof(op)));
    op.kind = kind;
    op.causal = 1;
    op.form = kind == ATTUNE_INDEXER_SCORES ? 0 : ATTUNE_INDEX_POSITIONS;
    if (kind != ATTUNE_INDEXER_SELECT) {
      op.q = tensor(q, ATTUNE_FLOAT8_E4M3, {1, rows, kHeads, kDim});
      op.weights = tensor(weights, ATTUNE_FLOAT32, {1, rows, kHeads});
    }
    op.cache.k = tensor(k, ATTUNE_FLOAT8_E4M3, {keys / kPage, kPage, 1, kDim});
    op.cache.k_scale = tensor(k_scale, ATTUNE_FLOAT32, {keys / kPage, kPage, 1});
    op.cache.page_table = tensor(table, ATTUNE_INT32, {1, keys / kPage});
    op.seqused_kv = tensor(seqused, ATTUNE_INT32, {1});
    if (kind != ATTUNE_INDEXER_TOPK) op.scores = tensor(scores, ATTUNE_FLOAT32, {1, rows, keys});
    if (kind != ATTUNE_INDEXER_SCORES) {
      op.indices = tensor(kind == ATTUNE_INDEXER_TOPK ? indices : selected, ATTUNE_INT32, {1, rows, kTopk});
      op.topk_length = tensor(lengths, ATTUNE_INT32, {rows});
    }
    return op;
  }

  void run(attune_indexer_kind kind) const {
    Operation(operation(kind), stream).run();
    stream.synchronize();
  }
};

// More rows than one launch takes: TOPK in several launches is as in one. Then the choice of some rows, exactly.
TEST_F(CudaIndexer, LongRowsInSeveralLaunches) {
  const Stream stream(kDevice);
  const LongProblem p(stream, 300, 131072);
  for (const attune_indexer_kind kind : kKinds) p.run(kind);
  const std::vector<int32_t> indices = to_host<int32_t>(stream, p.indices);
  ASSERT_EQ(indices, to_host<int32_t>(stream, p.selected));
  const std::vector<float> scores = to_host<float>(stream, p.scores);
  for (int64_t row = 0; row < p.rows; row += 37) {
    const float* const at = scores.data() + row * p.keys;
    const int64_t seen = p.keys - p.rows + row + 1;
    std::vector<int32_t> best(static_cast<size_t>(seen));
    for (size_t i = 0; i < best.size(); ++i) best[i] = static_cast<int32_t>(i);
    const auto better = [&](int32_t a, int32_t b) { return at[a] > at[b] || (at[a] == at[b] && a < b); };
    std::nth_element(best.begin(), best.begin() + LongProblem::kTopk, best.end(), better);
    best.resize(LongProblem::kTopk);
    std::sort(best.begin(), best.end());
    EXPECT_TRUE(std::equal(best.begin(), best.end(), indices.begin() + row * LongProblem::kTopk)) << row;
  }
}

// Rows of every distribution, for one block, for clusters, and longer than a block can mark at once.
TEST_F(CudaIndexer, SelectsFromAnyDistribution) {
  const Stream stream(kDevice);
  constexpr size_t kDistributions = std::size(tests::kDistributions);
  const struct {
    int64_t rows, keys, topk;
  } shapes[] = {{12, 2049, 2048},    {12, 4097, 4096},  {12, 8192, 2048},    {12, 16385, 1},
                {3, 131072, 2048},   {12, 131071, 500}, {12, 131073, 20000}, {12, 300001, 150000},
                {12, 1100000, 2048}, {140, 9001, 2048}, {140, 140001, 2048}};
  for (const auto& [rows, keys, topk] : shapes) {
    cases::Random random("select", static_cast<uint64_t>(keys));
    std::vector<float> scores(static_cast<size_t>(rows * keys));
    for (size_t i = 0; i < scores.size(); ++i) {
      const size_t row = i / static_cast<size_t>(keys);
      scores[i] = tests::kDistributions[row % kDistributions].score(i % static_cast<size_t>(keys), random);
    }
    const DeviceMemory in = to_device(stream, scores),
                       seqused = to_device(stream, std::vector<int32_t>(1, int32_t(keys)));
    const DeviceMemory out(kDevice, static_cast<size_t>(rows * topk * 4));
    attune_indexer op;
    EXPECT_ATTUNE_OK(attune_indexer_init(&op, sizeof(op)));
    op.kind = ATTUNE_INDEXER_SELECT;
    op.form = ATTUNE_INDEX_POSITIONS;
    op.scores = tensor(in, ATTUNE_FLOAT32, {1, rows, keys});
    op.indices = tensor(out, ATTUNE_INT32, {1, rows, topk});
    op.seqused_kv = tensor(seqused, ATTUNE_INT32, {1});
    for (int run = 0; run < 2; ++run) {
      fill_bytes(stream, out.data(), 0x77, out.bytes());
      Operation(op, stream).run();
      stream.synchronize();
      const std::vector<int32_t> indices = to_host<int32_t>(stream, out);
      for (int64_t row = 0; row < std::min<int64_t>(rows, 24); ++row) {
        const auto first = scores.begin() + row * keys;
        const std::vector<int32_t> expected =
            tests::expected_choice(std::vector<float>(first, first + keys), 0, static_cast<size_t>(topk));
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), indices.begin() + row * topk))
            << tests::kDistributions[static_cast<size_t>(row) % kDistributions].name << " " << rows << " " << keys
            << " " << topk;
      }
    }
  }
}

// A score's bits depend on its row and key alone, and two runs agree.
TEST_F(CudaIndexer, DoesNotDependOnTheRowsBeside) {
  const Stream stream(kDevice);
  const LongProblem p(stream, 40, 4096);
  p.run(ATTUNE_INDEXER_SCORES);
  const std::vector<float> all = to_host<float>(stream, p.scores);
  p.run(ATTUNE_INDEXER_SCORES);
  EXPECT_EQ(to_host<float>(stream, p.scores), all);
  for (const int64_t row : {0, 17, 39}) {
    attune_indexer one = p.operation(ATTUNE_INDEXER_SCORES);
    for (attune_tensor* t : {&one.q, &one.weights, &one.scores}) {
      t->data = static_cast<std::byte*>(t->data) +
                row * t->stride[1] * cases::element_size(static_cast<attune_dtype>(t->dtype));
      t->shape[1] = 1;
    }
    one.causal = 0;
    Operation(one, stream).run();
    stream.synchronize();
    const std::vector<float> alone = to_host<float>(stream, p.scores);
    const int64_t seen = p.keys - p.rows + row + 1;
    EXPECT_TRUE(
        std::equal(alone.begin() + row * p.keys, alone.begin() + row * p.keys + seen, all.begin() + row * p.keys))
        << row;
  }
}

// A captured run is right with lengths that come later.
TEST_F(CudaIndexer, RunsInAGraph) {
  const Stream stream(kDevice);
  const LongProblem p(stream, 2, 8192);
  const Operation topk(p.operation(ATTUNE_INDEXER_TOPK), stream);
  topk.run();  // finds its kernels
  stream.synchronize();
  const Graph graph(stream, [&] { topk.run(); });
  for (const int32_t length : {8192, 100, 3000, 0, 5000}) {
    copy_to_device(stream, p.seqused.data(), &length, sizeof(length));
    fill_bytes(stream, p.indices.data(), 0x77, p.indices.bytes());
    graph.replay(stream);
    stream.synchronize();
    const std::vector<int32_t> replayed = to_host<int32_t>(stream, p.indices);
    const std::vector<int32_t> lengths = to_host<int32_t>(stream, p.lengths);
    for (int64_t row = 0; row < 2; ++row) {
      const int64_t seen = std::max<int64_t>(length - 2 + row + 1, 0);
      EXPECT_EQ(lengths[static_cast<size_t>(row)], std::min<int64_t>(seen, LongProblem::kTopk)) << length;
    }
    p.run(ATTUNE_INDEXER_SCORES);
    p.run(ATTUNE_INDEXER_SELECT);
    EXPECT_EQ(to_host<int32_t>(stream, p.selected), replayed) << length;
  }
}

TEST_F(CudaIndexer, HostMemoryIsRefused) {
  cases::IndexerProblem problem(small_case());
  const attune_indexer op = problem.host(ATTUNE_INDEXER_TOPK);
  const attune_device gpu = {ATTUNE_DEVICE_CUDA, kDevice};
  size_t bytes = 0;
  ASSERT_ATTUNE_OK(attune_indexer_workspace_size(&op, gpu, &bytes));
  const DeviceMemory workspace(kDevice, bytes);
  EXPECT_EQ(attune_indexer_run(&op, gpu, workspace.data(), bytes - 1, nullptr), ATTUNE_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(attune_indexer_run(&op, gpu, workspace.data(), bytes, nullptr), ATTUNE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(attune_last_error()).find("q.data"), std::string::npos) << attune_last_error();
}

}  // namespace
}  // namespace attune::cuda
