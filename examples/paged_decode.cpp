// SPDX-License-Identifier: Apache-2.0
// One decode step over a paged bf16 cache: four sequences of different lengths, 8 query heads on 2 KV heads. One row is
// computed again with plain loops.
#include <attune/attune.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

namespace {

constexpr int64_t kBatch = 4, kHeadsQ = 8, kHeadsKv = 2, kHeadDim = 64, kPageSize = 16, kMaxPages = 8;
constexpr int64_t kPages = kBatch * kMaxPages;

// Truncation is enough for sample data.
uint16_t to_bf16(float x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16); }
double from_bf16(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

std::vector<uint16_t> random_bf16(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = to_bf16(normal(engine));
  return values;
}

double dot(const uint16_t* a, const uint16_t* b) {
  double sum = 0;
  for (int64_t d = 0; d < kHeadDim; ++d) sum += from_bf16(a[d]) * from_bf16(b[d]);
  return sum;
}

int run() {
  const auto q = random_bf16(kBatch * kHeadsQ * kHeadDim, 1);               // [batch, heads_q, head_dim]
  const auto k = random_bf16(kPages * kPageSize * kHeadsKv * kHeadDim, 2);  // [pages, page_size, heads_kv, head_dim]
  const auto v = random_bf16(kPages * kPageSize * kHeadsKv * kHeadDim, 3);
  std::vector<float> out(static_cast<size_t>(kBatch * kHeadsQ * kHeadDim));  // the type of out is free

  // Which pages hold a sequence, in order. An allocator hands them out as it likes.
  std::vector<int32_t> page_table(static_cast<size_t>(kBatch * kMaxPages));
  for (size_t i = 0; i < page_table.size(); ++i) page_table[i] = static_cast<int32_t>(i);
  std::shuffle(page_table.begin(), page_table.end(), std::mt19937(4));
  const std::vector<int32_t> seqused_kv = {1, 16, 77, 128};

  attune::Attention a;
  a.q = attune::dense(q.data(), ATTUNE_BFLOAT16, {kBatch, kHeadsQ, kHeadDim});
  a.cache.k = attune::dense(k.data(), ATTUNE_BFLOAT16, {kPages, kPageSize, kHeadsKv, kHeadDim});
  a.cache.v = attune::dense(v.data(), ATTUNE_BFLOAT16, {kPages, kPageSize, kHeadsKv, kHeadDim});
  a.cache.page_table = attune::dense(page_table.data(), {kBatch, kMaxPages});
  a.seqused_kv = attune::dense(seqused_kv.data(), {kBatch});
  a.out = attune::dense(out.data(), {kBatch, kHeadsQ, kHeadDim});

  const attune::Plan plan(a);
  const attune::Workspace workspace(plan.workspace_size());
  plan.run(a, workspace);  // in an engine: once for each layer and step, with the same plan
  std::printf("%s\n", plan.describe().c_str());

  // The same, for one row.
  const int64_t b = 2, h = 5, h_kv = h / (kHeadsQ / kHeadsKv);
  const auto row = [&](const std::vector<uint16_t>& pool, int64_t token) {
    const int64_t page = page_table[static_cast<size_t>(b * kMaxPages + token / kPageSize)];
    return &pool[static_cast<size_t>(((page * kPageSize + token % kPageSize) * kHeadsKv + h_kv) * kHeadDim)];
  };
  const int64_t offset = (b * kHeadsQ + h) * kHeadDim;
  std::vector<double> expected(kHeadDim);
  double sum = 0;
  for (int64_t token = 0; token < seqused_kv[b]; ++token) {
    const double p =
        std::exp(dot(&q[static_cast<size_t>(offset)], row(k, token)) / std::sqrt(static_cast<double>(kHeadDim)));
    sum += p;
    for (int64_t d = 0; d < kHeadDim; ++d) expected[static_cast<size_t>(d)] += p * from_bf16(row(v, token)[d]);
  }
  double worst = 0;
  for (int64_t d = 0; d < kHeadDim; ++d) {
    const double error = std::abs(out[static_cast<size_t>(offset + d)] - expected[static_cast<size_t>(d)] / sum);
    if (!(error <= worst)) worst = error;  // a NaN stays
  }
  std::printf("largest error of row %lld, head %lld: %.1e\n", static_cast<long long>(b), static_cast<long long>(h),
              worst);
  return worst <= 1e-2 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& e) {  // attune::Error among them, with its status
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
