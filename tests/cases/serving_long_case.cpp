// SPDX-License-Identifier: Apache-2.0
// Long prompts with a KV head for each query head, or for three: kernels may take two neighbouring blocks of rows
// together there, which short prompts and few heads never show.
#include <algorithm>

#include "serving_draw.h"

namespace attune::cases {

Case serving_long_case(Random& r, uint64_t configuration) {
  constexpr int64_t kRows = 72000;  // of all heads together: they fill a GPU several times
  Random of_configuration("serving long prompts", configuration);
  Case c;
  c.dtype = of_configuration.pick<attune_dtype>({ATTUNE_BFLOAT16, ATTUNE_FLOAT16});
  c.num_heads_q = of_configuration.pick<int64_t>({16, 32, 30});
  c.num_heads_kv = c.num_heads_q == 30 ? 10 : c.num_heads_q;
  c.head_dim_qk = of_configuration.pick<int64_t>({128, 192, 192, 96});
  c.head_dim_v = std::min<int64_t>(c.head_dim_qk, 128);
  c.causal = of_configuration.chance(0.6);
  if (c.causal || of_configuration.chance(0.4)) {
    c.kv = KvSource::kPaged;
    c.cache.page_size = of_configuration.pick<int64_t>({16, 64, 24});
    c.new_tokens = of_configuration.chance(0.3);
  } else if (of_configuration.chance(0.3)) {
    c.alibi = 1;
  }
  if (c.causal && of_configuration.chance(0.2)) c.window_left = 4200;
  c.lse = r.chance(0.5);
  if (r.chance(0.2)) c.sinks = "mixed";
  // 4,096 tokens in the mean, or with blocks of fewer tokens 1,400; unlike ones.
  const int64_t mean = c.causal || c.num_heads_q == c.num_heads_kv ? 4096 : 1400,
                total = std::max(mean, kRows / c.num_heads_q) + r.integer(0, 900);
  int64_t left = total;
  for (int64_t sequences = r.integer(1, total / mean); sequences > 0; --sequences) {
    const int64_t n = sequences == 1 ? left : r.integer(1, std::max<int64_t>(1, left / 2));
    c.seqlens_q.push_back(n);
    c.seqlens_kv.push_back(c.kv == KvSource::kDense ? n : c.new_tokens ? r.integer(0, 700) : n + r.integer(0, 700));
    left -= n;
  }
  r.shuffle(c.seqlens_q);
  if (c.kv == KvSource::kDense && r.chance(0.3)) {
    c.queries = QueryShape::kFixed;
    std::fill(c.seqlens_q.begin(), c.seqlens_q.end(), total / c.batch());
  }
  if (c.kv == KvSource::kDense) c.seqlens_kv = c.seqlens_q;
  for (size_t b = 0; b < c.seqlens_q.size(); ++b)
    if (c.kv != KvSource::kDense && !c.new_tokens) c.seqlens_kv[b] = std::max(c.seqlens_kv[b], c.seqlens_q[b]);
  return c;
}

}  // namespace attune::cases
