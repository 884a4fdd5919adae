// SPDX-License-Identifier: Apache-2.0
// The indexer on the first GPU in the shapes of DeepSeek V3.2: 64 heads of 128 channels, e4m3 with scales, pages of 64
// tokens in any order, 2048 keys chosen, by replaying a graph. The time is that of one call (TOPK); the label has us of
// its two halves by themselves (SCORES, and SELECT, which also looks for bad pages), bytes of keys and scores over the
// time of the scores, and their multiplications and additions.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attune/attune.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace attune::cuda {
namespace {

constexpr attune_device kGpu = {ATTUNE_DEVICE_CUDA, 0};
constexpr int64_t kHeads = 64, kDim = 128, kPageSize = 64, kTopk = 2048;
constexpr int kLaunches = 10;  // of a graph

attune_tensor tensor(const DeviceMemory& memory, attune_dtype dtype, std::vector<int64_t> shape) {
  return attune_dense_tensor(memory.data(), dtype, static_cast<int32_t>(shape.size()), shape.data());
}

// Codes of both signs over a few binades, so that scores are spread as real ones are.
std::vector<uint8_t> codes(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> x(static_cast<size_t>(count));
  for (uint8_t& byte : x) byte = static_cast<uint8_t>((random() & 0x80) | (0x20 + random() % 0x20));
  return x;
}

std::vector<float> normal(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(static_cast<size_t>(count));
  for (float& f : x) f = distribution(random);
  return x;
}

struct Data {
  Data(const Stream& stream, int64_t batch, int64_t queries, int64_t keys)
      : batch(batch), queries(queries), keys(keys), pages(batch * keys / kPageSize) {
    const int64_t rows = batch * queries;
    q = to_device(stream, codes(rows * kHeads * kDim, 1));
    q_scale = to_device(stream, std::vector<float>(static_cast<size_t>(rows * kHeads), 0.02f));
    weights = to_device(stream, normal(rows * kHeads, 2));
    k = to_device(stream, codes(pages * kPageSize * kDim, 3));
    k_scale = to_device(stream, std::vector<float>(static_cast<size_t>(pages * kPageSize), 0.02f));
    std::vector<int32_t> order(static_cast<size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(4));
    table = to_device(stream, order);
    seqused = to_device(stream, std::vector<int32_t>(static_cast<size_t>(batch), static_cast<int32_t>(keys)));
    scores = DeviceMemory(0, static_cast<size_t>(rows * keys * 4));
    indices = DeviceMemory(0, static_cast<size_t>(rows * kTopk * 4));
  }

  attune_indexer operation(attune_indexer_kind kind) const {
    attune_indexer op;
    attune_indexer_init(&op, sizeof(op));
    op.kind = kind;
    op.causal = 1;
    if (kind != ATTUNE_INDEXER_SELECT) {
      op.q = tensor(q, ATTUNE_FLOAT8_E4M3, {batch, queries, kHeads, kDim});
      op.q_scale = tensor(q_scale, ATTUNE_FLOAT32, {batch, queries, kHeads});
      op.weights = tensor(weights, ATTUNE_FLOAT32, {batch, queries, kHeads});
    }
    op.cache.k = tensor(k, ATTUNE_FLOAT8_E4M3, {pages, kPageSize, 1, kDim});
    op.cache.k_scale = tensor(k_scale, ATTUNE_FLOAT32, {pages, kPageSize, 1});
    op.cache.page_table = tensor(table, ATTUNE_INT32, {batch, keys / kPageSize});
    op.seqused_kv = tensor(seqused, ATTUNE_INT32, {batch});
    if (kind != ATTUNE_INDEXER_TOPK) op.scores = tensor(scores, ATTUNE_FLOAT32, {batch, queries, keys});
    if (kind != ATTUNE_INDEXER_SCORES) op.indices = tensor(indices, ATTUNE_INT32, {batch, queries, kTopk});
    return op;
  }

  int64_t batch, queries, keys, pages;
  DeviceMemory q, q_scale, weights, k, k_scale, table, seqused, scores, indices;
};

// An operation as a graph.
class Replay {
 public:
  Replay(const attune_indexer& op, const Stream& stream, benchmark::State& state) : stream_(stream) {
    size_t bytes = 0;
    attune_status status = attune_indexer_workspace_size(&op, kGpu, &bytes);
    workspace_ = DeviceMemory(0, bytes);
    const auto run = [&] {
      if (status == ATTUNE_OK) status = attune_indexer_run(&op, kGpu, workspace_.data(), bytes, stream.handle());
    };
    run();  // finds its kernels
    stream.synchronize();
    graph_ = std::make_unique<Graph>(stream, [&] {
      for (int i = 0; i < kLaunches; ++i) run();
    });
    if (status != ATTUNE_OK) state.SkipWithError(attune_last_error());
    graph_->replay(stream);
  }
  double seconds() {
    timer_.start(stream_);
    graph_->replay(stream_);
    timer_.stop(stream_);
    return timer_.milliseconds() / 1e3 / kLaunches;
  }

 private:
  const Stream& stream_;
  DeviceMemory workspace_;
  std::unique_ptr<Graph> graph_;
  Timer timer_{0};
};

void indexer(benchmark::State& state) {
  if (!why_no_device().empty()) return state.SkipWithError(why_no_device().c_str());
  const Stream stream(0);
  const Data data(stream, state.range(0), state.range(1), state.range(2));
  // SCORES first: they are what SELECT reads.
  const attune_indexer_kind kinds[] = {ATTUNE_INDEXER_SCORES, ATTUNE_INDEXER_SELECT, ATTUNE_INDEXER_TOPK};
  Replay replays[] = {{data.operation(kinds[0]), stream, state},
                      {data.operation(kinds[1]), stream, state},
                      {data.operation(kinds[2]), stream, state}};
  double total[3] = {};
  for (auto _ : state) {
    double seconds = 0;
    for (int i = 0; i < 3; ++i) total[i] += seconds = replays[i].seconds();
    state.SetIterationTime(seconds);
  }
  const auto runs = static_cast<double>(std::max<int64_t>(state.iterations(), 1));
  const auto rows = static_cast<double>(data.batch * data.queries), keys = static_cast<double>(data.keys);
  const double hidden = static_cast<double>(data.queries - 1) / 2;  // keys of a row, by causality
  const double seconds = total[0] / runs, pairs = rows * (keys - hidden);
  const double bytes = static_cast<double>(data.batch) * keys * (kDim + 4) + pairs * 4;
  char label[128];
  std::snprintf(label, sizeof(label), "scores %.1f us, select %.1f us; %.0f GB/s, %.0f TFLOP/s", total[0] / runs * 1e6,
                total[1] / runs * 1e6, bytes / seconds / 1e9, pairs * kHeads * kDim * 2 / seconds / 1e12);
  state.SetLabel(label);
}
BENCHMARK(indexer)
    ->ArgNames({"batch", "queries", "keys"})
    ->Args({1, 1, 8192})
    ->Args({1, 1, 32768})
    ->Args({1, 1, 131072})
    ->Args({4, 1, 131072})
    ->Args({32, 1, 32768})
    ->Args({64, 2, 65536})
    ->Args({128, 1, 65536})
    ->Args({1, 2048, 8192})
    ->Args({1, 4096, 32768})
    ->Args({1, 1024, 131072})
    ->Iterations(20)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace attune::cuda
