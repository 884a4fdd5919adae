// SPDX-License-Identifier: Apache-2.0
// The indexer on the CPU: one call, and its two halves. e4m3 queries and keys of 128 channels, pages of 64 tokens in
// any order, 2048 keys chosen. Times are for a (query, key) pair and a thread.
#include <attune/attune.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kDim = 128, kPageSize = 64, kTopk = 2048;

struct Shape {
  int64_t batch, queries, keys, heads;
  int64_t rows() const { return batch * queries; }
};

std::vector<float> normal(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = distribution(engine);
  return values;
}

// Every sequence reads the same pages, in an order of its own.
struct Data {
  explicit Data(const Shape& s)
      : pages((s.keys + kPageSize - 1) / kPageSize),
        weights(normal(s.rows() * s.heads, 1)),
        seqused(static_cast<size_t>(s.batch), static_cast<int32_t>(s.keys)) {
    const auto quantize = [](int64_t tokens, int64_t heads, uint32_t seed, std::vector<uint8_t>& codes,
                             std::vector<float>& scales) {
      const std::vector<float> x = normal(tokens * heads * kDim, seed);
      codes.resize(x.size());
      scales.resize(static_cast<size_t>(tokens * heads));
      attune::CacheOp op(ATTUNE_CACHE_QUANTIZE);
      op.k = attune::dense(x.data(), {tokens, heads, kDim});
      op.cache.k = attune::dense(codes.data(), ATTUNE_FLOAT8_E4M3, {1, tokens, heads, kDim});
      op.cache.k_scale = attune::dense(scales.data(), {1, tokens, heads});
      op.run();
    };
    quantize(pages * kPageSize, 1, 2, keys, key_scales);
    quantize(s.rows(), s.heads, 3, q, q_scales);
    std::vector<int32_t> order(static_cast<size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 engine(4);
    for (int64_t b = 0; b < s.batch; ++b) {
      std::shuffle(order.begin(), order.end(), engine);
      page_table.insert(page_table.end(), order.begin(), order.end());
    }
    scores.resize(static_cast<size_t>(s.rows() * s.keys));
    indices.resize(static_cast<size_t>(s.rows() * kTopk));
  }

  attune::Indexer operation(const Shape& s, attune_indexer_kind kind) {
    attune::Indexer op(kind);
    op.causal = 1;
    op.cache.k = attune::dense(keys.data(), ATTUNE_FLOAT8_E4M3, {pages, kPageSize, 1, kDim});
    op.cache.k_scale = attune::dense(key_scales.data(), {pages, kPageSize, 1});
    op.cache.page_table = attune::dense(page_table.data(), {s.batch, pages});
    op.seqused_kv = attune::dense(seqused.data(), {s.batch});
    if (kind != ATTUNE_INDEXER_SELECT) {
      op.q = attune::dense(q.data(), ATTUNE_FLOAT8_E4M3, {s.batch, s.queries, s.heads, kDim});
      op.q_scale = attune::dense(q_scales.data(), {s.batch, s.queries, s.heads});
      op.weights = attune::dense(weights.data(), {s.batch, s.queries, s.heads});
    }
    if (kind != ATTUNE_INDEXER_TOPK) op.scores = attune::dense(scores.data(), {s.batch, s.queries, s.keys});
    if (kind != ATTUNE_INDEXER_SCORES) op.indices = attune::dense(indices.data(), {s.batch, s.queries, kTopk});
    return op;
  }

  int64_t pages;
  std::vector<uint8_t> keys, q;
  std::vector<float> key_scales, q_scales, weights, scores;
  std::vector<int32_t> page_table, seqused, indices;
};

// The best of the runs: a mean would also measure what else the machine does.
void indexer(benchmark::State& state) {
  const Shape s{state.range(0), state.range(1), state.range(2), state.range(3)};
  Data data(s);
  int32_t threads = 0;
  attune::check(attune_get_num_threads(&threads));
  const int64_t hidden = s.queries * (s.queries - 1) / 2;  // by causality, in a sequence
  const auto pairs = static_cast<double>(s.rows() * s.keys - s.batch * hidden);
  const char* const names[] = {"topk", "scores", "select"};
  double best[3] = {1e9, 1e9, 1e9};
  const auto time = [&](attune_indexer_kind kind) {
    const attune::Indexer op = data.operation(s, kind);
    const attune::Workspace workspace(op.workspace_size());
    const auto start = Clock::now();
    op.run(workspace);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best[kind] = std::min(best[kind], seconds);
  };
  time(ATTUNE_INDEXER_SCORES);  // what SELECT reads
  for (auto _ : state) {
    for (const attune_indexer_kind kind : {ATTUNE_INDEXER_TOPK, ATTUNE_INDEXER_SCORES, ATTUNE_INDEXER_SELECT})
      time(kind);
  }
  for (int kind = 0; kind < 3; ++kind) {
    const std::string name = names[kind];
    state.counters[name + " ms"] = best[kind] * 1e3;
    state.counters[name + " ns"] = best[kind] * threads * 1e9 / pairs;
  }
  state.counters["GFLOP/s"] = 2 * pairs * static_cast<double>(s.heads * kDim) / best[ATTUNE_INDEXER_SCORES] / 1e9;
}
BENCHMARK(indexer)
    ->ArgNames({"batch", "queries", "keys", "heads"})
    ->Args({1, 1, 8192, 64})
    ->Args({1, 1, 131072, 64})
    ->Args({8, 1, 16384, 64})
    ->Args({4, 2, 32768, 32})
    ->Args({1, 512, 8192, 64})
    ->Unit(benchmark::kMillisecond);

}  // namespace
