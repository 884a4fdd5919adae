// SPDX-License-Identifier: Apache-2.0
// What a call must compute and move at least, by its lengths.
#pragma once

#include <algorithm>
#include <cstdint>

#include "model.h"

namespace attune::cli {

struct Work {
  double flops = 0;
  double bytes = 0;
  Work& operator+=(const Work& other) {
    flops += other.flops;
    bytes += other.bytes;
    return *this;
  }
};

// Keys that the query at this position sees in a causal layer. window 0: all.
inline int64_t visible_keys(int64_t position, int64_t window) {
  return window == 0 ? position + 1 : std::min(position + 1, window);
}

// Two products of head_dim_qk and head_dim_v for every pair of a query and a key that it sees, in every head.
inline double attention_flops(const Model& m, int64_t pairs) {
  return 2.0 * static_cast<double>(pairs) * static_cast<double>(m.num_heads_q * (m.head_dim_qk + m.head_dim_v));
}

// Activations of some rows: q in, out out, and with new_tokens also k and v in.
inline double row_bytes(const Model& m, KvDtype kv, int64_t rows, bool new_tokens) {
  const int64_t q_and_out = m.num_heads_q * (m.head_dim_qk + m.head_dim_v);
  const int64_t k_and_v = new_tokens ? m.num_heads_kv * (m.head_dim_qk + (m.is_mla() ? 0 : m.head_dim_v)) : 0;
  const int64_t size = activation_dtype(kv) == ATTUNE_FLOAT32 ? 4 : 2;
  return static_cast<double>(rows * (q_and_out + k_and_v) * size);
}

// `tokens` new tokens after `cached` ones: the visible part of the cache is read once, the new tokens are appended.
inline Work decoder_work(const Model& m, KvDtype kv, int64_t cached, int64_t tokens, int64_t window) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < tokens; ++i) pairs += visible_keys(cached + i, window);
  const int64_t read = window == 0 ? cached : std::min(cached, window - 1);
  const double cache_bytes = static_cast<double>((read + tokens) * m.kv_bytes_per_token(kv));
  return {attention_flops(m, pairs), cache_bytes + row_bytes(m, kv, tokens, true)};
}

// One row over a list of slots.
inline Work sparse_work(const Model& m, KvDtype kv, int64_t keys) {
  return {attention_flops(m, keys),
          static_cast<double>((keys + 1) * m.kv_bytes_per_token(kv)) + row_bytes(m, kv, 1, true)};
}

// The indexer over `tokens` new tokens after `cached` ones: every visible key against all index heads; the cache is
// read once, the new keys are appended.
inline Work index_work(const Model& m, int64_t cached, int64_t tokens) {
  double pairs = 0;
  for (int64_t i = 0; i < tokens; ++i) pairs += static_cast<double>(visible_keys(cached + i, 0));
  const int64_t size = m.index_heads * m.index_head_dim;
  return {2.0 * pairs * static_cast<double>(size),
          static_cast<double>((cached + tokens) * m.index_bytes_per_token() +
                              tokens * (size + 4 * m.index_heads + 2 * m.index_head_dim + 4 * m.topk))};
}

// A prompt of the encoder, and its keys and values on their way into the cache for cross attention.
inline Work encoder_work(const Model& m, KvDtype kv, int64_t tokens) {
  const double append = static_cast<double>(tokens * (m.kv_bytes_per_token(kv))) + row_bytes(m, kv, tokens, true) -
                        row_bytes(m, kv, tokens, false);
  return {attention_flops(m, tokens * tokens), row_bytes(m, kv, tokens, true) + append};
}

inline Work cross_work(const Model& m, KvDtype kv, int64_t queries, int64_t keys) {
  return {attention_flops(m, queries * keys),
          static_cast<double>(keys * m.kv_bytes_per_token(kv)) + row_bytes(m, kv, queries, false)};
}

}  // namespace attune::cli
