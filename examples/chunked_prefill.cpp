// SPDX-License-Identifier: Apache-2.0
// A prompt in chunks: each run rotates (RoPE), appends to the paged cache, and attends to the cache and to its own new
// tokens, in one call. The last token must get what it gets when the prompt goes in as a whole.
#include <attune/attune.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

namespace {

constexpr int64_t kTokens = 100, kChunk = 32, kHeadsQ = 4, kHeadsKv = 2, kHeadDim = 32, kPageSize = 16;
constexpr int64_t kPages = (kTokens + kPageSize - 1) / kPageSize;
constexpr int64_t kRowQ = kHeadsQ * kHeadDim, kRowKv = kHeadsKv * kHeadDim;

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

struct Prompt {
  std::vector<float> q =
      random_floats(kTokens * kRowQ, 1);  // [tokens, heads_q, head_dim], straight from the projection
  std::vector<float> k = random_floats(kTokens * kRowKv, 2);  // [tokens, heads_kv, head_dim]
  std::vector<float> v = random_floats(kTokens * kRowKv, 3);
};

// Returns out [tokens, heads_q, head_dim].
std::vector<float> prefill(const Prompt& prompt, int64_t chunk) {
  std::vector<float> cache_k(static_cast<size_t>(kPages * kPageSize * kRowKv)), cache_v(cache_k.size());
  std::vector<float> out(static_cast<size_t>(kTokens * kRowQ));
  std::vector<int32_t> page_table(static_cast<size_t>(kPages));
  for (int64_t i = 0; i < kPages; ++i) page_table[static_cast<size_t>(i)] = static_cast<int32_t>(kPages - 1 - i);

  attune::Rope rope;
  rope.style = ATTUNE_ROPE_LINEAR;
  rope.dim = kHeadDim;
  rope.theta = 10000;
  const std::vector<float> cos_sin = rope.table(kTokens);

  int32_t cached = 0;  // tokens in the cache before the run
  attune::Attention a;
  a.cache.k = attune::dense(cache_k.data(), {kPages, kPageSize, kHeadsKv, kHeadDim});
  a.cache.v = attune::dense(cache_v.data(), {kPages, kPageSize, kHeadsKv, kHeadDim});
  a.cache.page_table = attune::dense(page_table.data(), {1, kPages});
  a.seqused_kv = attune::dense(&cached, {1});
  a.causal = 1;
  a.prologue.rope_cos_sin = attune::dense(cos_sin.data(), {kTokens, kHeadDim});
  a.prologue.append = 1;

  const auto set_chunk = [&](int64_t first, int64_t count) {
    a.q = attune::dense(&prompt.q[static_cast<size_t>(first * kRowQ)], {1, count, kHeadsQ, kHeadDim});
    a.k = attune::dense(&prompt.k[static_cast<size_t>(first * kRowKv)], {1, count, kHeadsKv, kHeadDim});
    a.v = attune::dense(&prompt.v[static_cast<size_t>(first * kRowKv)], {1, count, kHeadsKv, kHeadDim});
    a.out = attune::dense(&out[static_cast<size_t>(first * kRowQ)], {1, count, kHeadsQ, kHeadDim});
  };

  // One plan, made for the longest chunk, serves them all.
  set_chunk(0, std::min(chunk, kTokens));
  const attune::Plan plan(a);
  const attune::Workspace workspace(plan.workspace_size());
  for (int64_t first = 0; first < kTokens; first += chunk) {
    const int64_t count = std::min(chunk, kTokens - first);
    set_chunk(first, count);
    cached = static_cast<int32_t>(first);
    plan.run(a, workspace);
  }
  return out;
}

int run() {
  const Prompt prompt;
  const std::vector<float> whole = prefill(prompt, kTokens);
  const std::vector<float> chunked = prefill(prompt, kChunk);
  float worst = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    const float error = std::abs(whole[i] - chunked[i]);
    if (!(error <= worst)) worst = error;  // a NaN stays
  }
  std::printf("%lld tokens, whole or in chunks of %lld: largest difference %.1e\n", static_cast<long long>(kTokens),
              static_cast<long long>(kChunk), static_cast<double>(worst));
  return worst <= 1e-5f ? 0 : 1;
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
