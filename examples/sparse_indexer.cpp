// SPDX-License-Identifier: Apache-2.0
// A decode step of DeepSeek-style sparse attention, from the projections on: append to both caches, quantise the index
// queries, pick 64 keys of each sequence with the indexer, attend to those. The picked keys and one row of the result
// are computed again with plain loops.
#include <attune/attune.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kHeadDim = 576, kHeadDimV = 512;  // MLA, 656-byte cache
constexpr int64_t kIndexHeads = 16, kIndexDim = 128, kTopk = 64;
constexpr int64_t kPageSize = 64, kMaxPages = 5, kPages = kBatch * kMaxPages;
constexpr int64_t kTokens[kBatch] = {300, 40};  // with the new one; the second sees fewer than it may take

// A page of the index cache as vLLM and SGLang lay it out: the codes of its tokens, then their scales.
constexpr int64_t kIndexPageBytes = kPageSize * (kIndexDim + static_cast<int64_t>(sizeof(float)));

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

template <class T>
T* at(std::vector<T>& v, int64_t i) {
  return v.data() + i;
}

// A contiguous batch as a cache of one page, for quantising.
attune_kv_cache as_cache(attune::Tensor codes, attune::Tensor scales) {
  attune_kv_cache c{};
  c.k = codes;
  c.k_scale = scales;
  return c;
}

// The caches of one layer, on pages that both share.
struct Layer {
  std::vector<uint8_t> latent = std::vector<uint8_t>(kPages * kPageSize * 656);
  std::vector<float> index = std::vector<float>(static_cast<size_t>(kPages * kIndexPageBytes / 4));
  std::vector<int32_t> page_table = {7, 2, 9, 0, 4, 3, 1, 5, 8, 6};

  attune_kv_cache latent_cache(bool paged) {
    attune_kv_cache c{};
    c.format = ATTUNE_KV_MLA_656;
    c.layout = ATTUNE_KV_BYTES;
    c.k = attune::dense(latent.data(), {kPages, kPageSize, 656});
    if (paged) c.page_table = attune::dense(page_table.data(), {kBatch, kMaxPages});
    return c;
  }
  attune_kv_cache index_cache() {
    attune_kv_cache c{};
    c.k = attune::strided(index.data(), ATTUNE_FLOAT8_E4M3, {kPages, kPageSize, 1, kIndexDim},
                          {kIndexPageBytes, kIndexDim, kIndexDim, 1});
    c.k_scale = attune::strided(at(index, kPageSize * kIndexDim / 4), ATTUNE_FLOAT32, {kPages, kPageSize, 1},
                                {kIndexPageBytes / 4, 1, 1});
    c.page_table = attune::dense(page_table.data(), {kBatch, kMaxPages});
    return c;
  }
};

double largest_error(double error, double worst) { return error <= worst ? worst : error; }  // a NaN stays

int run() {
  Layer layer;
  std::vector<int32_t> offsets = {0}, none(kBatch, 0), seqused;
  for (const int64_t n : kTokens) {
    offsets.push_back(offsets.back() + static_cast<int32_t>(n));
    seqused.push_back(static_cast<int32_t>(n));
  }
  const int64_t total = offsets.back();
  auto latents = random_floats(total * kHeadDim, 1), index_keys = random_floats(total * kIndexDim, 2);

  // Every token goes to both caches. In an engine: the new ones, after RoPE (attune_qkv_prepare).
  attune::CacheOp append(ATTUNE_CACHE_APPEND);
  append.power_of_two_scales = 1;
  append.seqused_kv = attune::dense(none.data(), {kBatch});
  append.cu_seqlens = attune::dense(offsets.data(), {kBatch + 1});
  append.cache = layer.latent_cache(true);
  append.k = attune::dense(latents.data(), {total, 1, kHeadDim});
  append.run();
  append.cache = layer.index_cache();
  append.k = attune::dense(index_keys.data(), {total, 1, kIndexDim});
  append.run();

  // Index queries to e4m3, one scale for each token and head.
  auto index_q = random_floats(kBatch * kIndexHeads * kIndexDim, 3);
  auto weights = random_floats(kBatch * kIndexHeads, 4);
  std::vector<uint8_t> q_codes(index_q.size());
  std::vector<float> q_scale(kBatch * kIndexHeads);
  attune::CacheOp quantize(ATTUNE_CACHE_QUANTIZE);
  quantize.k = attune::dense(index_q.data(), {kBatch, kIndexHeads, kIndexDim});
  quantize.cache = as_cache(attune::dense(q_codes.data(), ATTUNE_FLOAT8_E4M3, {1, kBatch, kIndexHeads, kIndexDim}),
                            attune::dense(q_scale.data(), {1, kBatch, kIndexHeads}));
  quantize.run();

  // The keys to attend to, as slots of the latent cache, whose pages are those of the index cache.
  std::vector<int32_t> indices(kBatch * kTopk), topk_length(kBatch);
  attune::Indexer indexer;
  indexer.q = attune::dense(q_codes.data(), ATTUNE_FLOAT8_E4M3, {kBatch, kIndexHeads, kIndexDim});
  indexer.q_scale = attune::dense(q_scale.data(), {kBatch, kIndexHeads});
  indexer.weights = attune::dense(weights.data(), {kBatch, kIndexHeads});
  indexer.cache = layer.index_cache();
  indexer.seqused_kv = attune::dense(seqused.data(), {kBatch});
  indexer.indices = attune::dense(indices.data(), {kBatch, kTopk});
  indexer.topk_length = attune::dense(topk_length.data(), {kBatch});
  const attune::Workspace index_workspace(indexer.workspace_size());
  indexer.run(index_workspace);

  auto q = random_floats(kBatch * kHeads * kHeadDim, 5);
  std::vector<float> out(kBatch * kHeads * kHeadDimV), dense_out(out.size());
  attune::Attention a;
  a.q = attune::dense(q.data(), {kBatch, kHeads, kHeadDim});
  a.cache = layer.latent_cache(false);
  a.indices = indexer.indices;
  a.topk_length = indexer.topk_length;
  a.out = attune::dense(out.data(), {kBatch, kHeads, kHeadDimV});
  const attune::Plan plan(a);
  plan.run(a, attune::Workspace(plan.workspace_size()));

  // Dense attention, for the sequence that takes all of its keys.
  attune::Attention dense;
  dense.q = a.q;
  dense.cache = layer.latent_cache(true);
  dense.seqused_kv = indexer.seqused_kv;
  dense.out = attune::dense(dense_out.data(), {kBatch, kHeads, kHeadDimV});
  const attune::Plan dense_plan(dense);
  dense_plan.run(dense, attune::Workspace(dense_plan.workspace_size()));
  double worst = 0;
  for (size_t i = out.size() / 2; i < out.size(); ++i) {
    worst = largest_error(std::fabs(static_cast<double>(out[i]) - dense_out[i]), worst);
  }

  // The first sequence again, from what is stored.
  const int64_t n = kTokens[0];
  attune::CacheOp gather(ATTUNE_CACHE_GATHER);
  gather.seqused_kv = indexer.seqused_kv;
  gather.cu_seqlens = append.cu_seqlens;
  gather.cache = layer.index_cache();
  gather.k = append.k;
  gather.run();  // index_keys: as the cache has them
  gather.cache = layer.latent_cache(true);
  gather.k = attune::dense(latents.data(), {total, 1, kHeadDim});
  gather.run();
  quantize.kind = ATTUNE_CACHE_DEQUANTIZE;
  quantize.run();
  std::vector<double> score(static_cast<size_t>(n));
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t h = 0; h < kIndexHeads; ++h) {
      double dot = 0;
      for (int64_t d = 0; d < kIndexDim; ++d) {
        dot += static_cast<double>(*at(index_q, h * kIndexDim + d)) * *at(index_keys, j * kIndexDim + d);
      }
      score[static_cast<size_t>(j)] += *at(weights, h) * std::max(dot, 0.0);
    }
  }
  std::vector<int64_t> best(static_cast<size_t>(n));
  for (int64_t j = 0; j < n; ++j) best[static_cast<size_t>(j)] = j;
  std::sort(best.begin(), best.end(),
            [&](int64_t x, int64_t y) { return score[static_cast<size_t>(x)] > score[static_cast<size_t>(y)]; });
  best.resize(kTopk);
  std::sort(best.begin(), best.end());
  int64_t wrong = topk_length[0] == kTopk && topk_length[1] == kTokens[1] ? 0 : 1;
  for (int64_t i = 0; i < kTopk; ++i) {
    const int64_t j = best[static_cast<size_t>(i)];
    wrong += indices[static_cast<size_t>(i)] != *at(layer.page_table, j / kPageSize) * kPageSize + j % kPageSize;
  }
  for (int64_t i = kTokens[1]; i < kTopk; ++i) wrong += *at(indices, kTopk + i) != -1;

  std::vector<double> expected(kHeadDimV);
  double sum = 0;
  for (const int64_t j : best) {
    double dot = 0;
    for (int64_t d = 0; d < kHeadDim; ++d) dot += static_cast<double>(*at(q, d)) * *at(latents, j * kHeadDim + d);
    const double p = std::exp(dot / std::sqrt(static_cast<double>(kHeadDim)));
    sum += p;
    for (int64_t d = 0; d < kHeadDimV; ++d) *at(expected, d) += p * *at(latents, j * kHeadDim + d);
  }
  for (int64_t d = 0; d < kHeadDimV; ++d) worst = largest_error(std::fabs(*at(out, d) - *at(expected, d) / sum), worst);
  std::printf("%lld of %lld keys picked, %lld wrong; largest error of the attention: %.1e\n",
              static_cast<long long>(kTopk), static_cast<long long>(n), static_cast<long long>(wrong), worst);
  return wrong == 0 && worst <= 1e-4 ? 0 : 1;
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
