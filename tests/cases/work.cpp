// SPDX-License-Identifier: Apache-2.0
#include "work.h"

#include <algorithm>

#include "number.h"

namespace attune::cases {
namespace {

// Bytes of one token of one KV head, K and V, with the scales of its own.
double token_bytes(const Case& c, bool cached) {
  if (cached && c.cache.format == ATTUNE_KV_MLA_656) return 656;
  if (cached && c.cache.format == ATTUNE_KV_MLA_584) return 584;
  const int64_t elements = c.head_dim_qk + (c.shared_kv ? 0 : c.head_dim_v);
  const int64_t size = element_size(cached ? c.cache_dtype() : c.dtype);
  const auto scales_of = [&](int64_t dim) { return cached ? scale_bytes_of_row(c.cache.scales, dim) : 0; };
  const int64_t scales = scales_of(c.head_dim_qk) + (c.shared_kv ? 0 : scales_of(c.head_dim_v));
  return static_cast<double>(elements * size + scales);
}

}  // namespace

Work work_of(const Case& c) {
  Work work;
  double pairs = 0;
  for (int64_t b = 0; b < c.batch(); ++b) {
    const int64_t n_q = c.seqlens_q[static_cast<size_t>(b)], keys = c.keys(b);
    const auto heads_kv = static_cast<double>(c.num_heads_kv);
    if (c.sparse.topk > 0) {
      const auto listed = static_cast<double>(n_q * (c.sparse.topk + c.extra.topk));
      pairs += listed;
      work.bytes += listed * heads_kv * token_bytes(c, c.has_cache());
      continue;
    }
    int64_t first_seen = keys, last_seen = -1;
    for (int64_t i = 0; i < n_q; ++i) {
      const int64_t position = keys - n_q + i;
      const int64_t first = c.window_left >= 0 ? std::max<int64_t>(0, position - c.window_left) : 0;
      int64_t last = c.causal ? std::min(position, keys - 1) : keys - 1;
      if (c.window_right >= 0) last = std::min(last, position + c.window_right);
      if (last < first) continue;
      pairs += static_cast<double>(last - first + 1);
      first_seen = std::min(first_seen, first);
      last_seen = std::max(last_seen, last);
    }
    if (last_seen < first_seen) continue;
    const int64_t stored = c.stored(b);
    const int64_t from_store = std::max<int64_t>(0, std::min(last_seen + 1, stored) - first_seen);
    const int64_t from_new = last_seen + 1 - first_seen - from_store;
    work.bytes += heads_kv * (static_cast<double>(from_store) * token_bytes(c, c.has_cache()) +
                              static_cast<double>(from_new) * token_bytes(c, false));
  }
  work.tokens = static_cast<double>(c.total_q());
  work.flops = 2 * pairs * static_cast<double>(c.num_heads_q * (c.head_dim_qk + c.head_dim_v));
  work.bytes +=
      work.tokens * static_cast<double>(c.num_heads_q * (c.head_dim_qk * element_size(c.dtype) +
                                                         c.head_dim_v * element_size(c.resolved_out_dtype())));
  if (c.backward.on) {
    const auto qk = static_cast<double>(c.head_dim_qk), v = static_cast<double>(c.head_dim_v);
    work.flops *= (3 * qk + 2 * v) / (qk + v);
    // dq, dk and dv as q, k and v, dout as out.
    work.bytes *= 2;
  }
  return work;
}

}  // namespace attune::cases
