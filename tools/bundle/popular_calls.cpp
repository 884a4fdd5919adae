// SPDX-License-Identifier: Apache-2.0
#include "popular_calls.h"

namespace attune::bundle {
namespace {

constexpr int64_t kPageSize = 64;
constexpr int64_t kTopk = 2048;

attune_tensor tensor(attune_dtype dtype, std::initializer_list<int64_t> shape) {
  return attune_dense_tensor(nullptr, dtype, static_cast<int32_t>(shape.size()), shape.begin());
}

void set_cache(attune_attention& a, const PopularModel& m, const Serving& s) {
  const int64_t pages = (s.keys + kPageSize - 1) / kPageSize;
  a.cache.k = tensor(s.cache, {s.batch * pages, kPageSize, m.num_heads_kv, m.head_dim_qk});
  a.cache.v = tensor(s.cache, {s.batch * pages, kPageSize, m.num_heads_kv, m.head_dim_v});
  if (s.cache == ATTUNE_INT8) a.cache.k_scale = tensor(ATTUNE_FLOAT32, {s.batch * pages, kPageSize, m.num_heads_kv});
  if (s.cache == ATTUNE_FLOAT8_E4M3) a.cache.k_scale = tensor(ATTUNE_FLOAT32, {m.num_heads_kv});
  a.cache.v_scale = a.cache.k_scale;
  a.cache.page_table = tensor(ATTUNE_INT32, {s.batch, pages});
  a.seqused_kv = tensor(ATTUNE_INT32, {s.batch});
}

void set_rows(attune_attention& a, const PopularModel& m, const Serving& s) {
  const int heads = a.q.rank - 2, dim = a.q.rank - 1;
  int64_t shape[ATTUNE_MAX_RANK];
  std::copy(a.q.shape, a.q.shape + a.q.rank, shape);
  shape[heads] = m.num_heads_kv;
  a.k = attune_dense_tensor(nullptr, s.activations, a.q.rank, shape);
  shape[dim] = m.head_dim_v;
  a.v = attune_dense_tensor(nullptr, s.activations, a.q.rank, shape);
}

// These operations are checked as for a run, so their tensors need addresses; nothing is there.
attune_tensor placed(attune_tensor t, int64_t place) {
  t.data = reinterpret_cast<void*>(place << 40);
  return t;
}

attune_kv_cache placed(attune_kv_cache c) {
  c.k = placed(c.k, 1);
  c.v = placed(c.v, 2);
  if (c.k_scale.dtype != ATTUNE_DTYPE_NONE) c.k_scale = placed(c.k_scale, 3), c.v_scale = placed(c.v_scale, 4);
  c.page_table = placed(c.page_table, 5);
  return c;
}

// MLA: one head, V is part of K.
attune_kv_cache latent_cache(const PopularModel& m, const Serving& s) {
  const int64_t pages = s.batch * ((s.keys + kPageSize - 1) / kPageSize);
  attune_kv_cache c{};
  if (m.packed_cache) {
    c.format = ATTUNE_KV_MLA_656;
    c.layout = ATTUNE_KV_BYTES;
    c.k = placed(tensor(ATTUNE_UINT8, {pages, kPageSize, 656}), 1);
  } else {
    c.k = placed(tensor(s.cache, {pages, kPageSize, 1, m.head_dim_qk}), 1);
  }
  c.page_table = placed(tensor(ATTUNE_INT32, {s.batch, pages / s.batch}), 5);
  return c;
}

}  // namespace

attune_attention cross_call(const PopularModel& m, const Serving& s, bool ragged) {
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  if (ragged) {
    a.q = tensor(s.activations, {s.batch * s.queries, m.num_heads_q, m.head_dim_qk});
    a.out = tensor(s.activations, {s.batch * s.queries, m.num_heads_q, m.head_dim_v});
    a.cu_seqlens_q = tensor(ATTUNE_INT32, {s.batch + 1});
    a.max_seqlen_q = s.queries;
  } else {
    a.q = tensor(s.activations, {s.batch, s.queries, m.num_heads_q, m.head_dim_qk});
    a.out = tensor(s.activations, {s.batch, s.queries, m.num_heads_q, m.head_dim_v});
  }
  set_cache(a, m, s);
  a.softcap = static_cast<float>(m.softcap);
  return a;
}

attune_attention self_call(const PopularModel& m, const Serving& s, bool ragged) {
  attune_attention a = cross_call(m, s, ragged);
  a.causal = 1;
  if (m.window > 0) a.window_left = m.window - 1;
  if (m.alibi) a.alibi_slopes = tensor(ATTUNE_FLOAT32, {m.num_heads_q});
  if (m.sinks) a.sinks = tensor(ATTUNE_FLOAT32, {m.num_heads_q});
  if (m.t5_buckets > 0) {
    a.t5_bias = tensor(ATTUNE_FLOAT32, {m.num_heads_q, m.t5_buckets});
    a.t5_max_distance = m.t5_max_distance;
  }
  return a;
}

attune_attention chunk_call(const PopularModel& m, const Serving& s) {
  attune_attention a = self_call(m, s, true);
  set_rows(a, m, s);
  return a;
}

attune_attention packed_chunk_call(const PopularModel& m, const Serving& s) {
  attune_attention a = chunk_call(m, s);
  const int64_t x = a.cache.k.dtype == s.activations ? 8 : 16;
  const int64_t pages = a.cache.k.shape[0];
  a.cache.layout = ATTUNE_KV_XPACKED;
  a.cache.k = tensor(s.cache, {pages, m.num_heads_kv, m.head_dim_qk / x, kPageSize, x});
  a.cache.v = tensor(s.cache, {pages, m.num_heads_kv, m.head_dim_v, kPageSize});
  if (s.cache == ATTUNE_INT8)
    a.cache.k_scale = a.cache.v_scale = tensor(ATTUNE_FLOAT32, {pages, m.num_heads_kv, kPageSize});
  return a;
}

attune_attention prompt_call(const PopularModel& m, const Serving& s) {
  attune_attention a = chunk_call(m, s);
  a.cache = attune_kv_cache{};
  a.seqused_kv = attune_tensor{};
  a.cu_seqlens_kv = a.cu_seqlens_q;
  return a;
}

attune_attention fp8_call(const PopularModel& m, const Serving& s) {
  attune_attention a = prompt_call(m, {ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E4M3, s.batch, s.keys, s.queries});
  a.out.dtype = ATTUNE_BFLOAT16;
  a.prologue.qkv_scale = tensor(ATTUNE_FLOAT32, {3});
  return a;
}

attune_attention fused_call(const PopularModel& m, const Serving& s, bool ragged) {
  attune_attention a = self_call(m, s, ragged);
  set_rows(a, m, s);
  a.prologue.append = 1;
  if (m.rope_dim > 0) {
    a.prologue.rope_cos_sin = tensor(ATTUNE_FLOAT32, {s.keys + s.queries, m.rope_dim});
    a.prologue.rope_offset = m.rope_offset;
    a.prologue.rope_interleaved = m.rope_interleaved ? 1 : 0;
  }
  return a;
}

attune_qkv_prepare prepare_call(const PopularModel& m, const Serving& s) {
  const attune_attention a = fused_call(m, s, true);
  attune_qkv_prepare op;
  attune_qkv_prepare_init(&op, sizeof(op));
  op.q = op.q_out = placed(a.q, 6);
  op.k = placed(a.k, 7);
  op.v = placed(a.v, 8);
  op.cu_seqlens_q = placed(a.cu_seqlens_q, 9);
  op.seqused_kv = placed(a.seqused_kv, 10);
  op.cache = placed(a.cache);
  op.prologue = a.prologue;
  if (m.rope_dim > 0) op.prologue.rope_cos_sin = placed(a.prologue.rope_cos_sin, 11);
  return op;
}

attune_cache_op append_call(const PopularModel& m, const Serving& s) {
  const attune_attention a = fused_call(m, s, true);
  attune_cache_op op;
  attune_cache_op_init(&op, sizeof(op));
  op.kind = ATTUNE_CACHE_APPEND;
  op.k = placed(a.k, 7);
  op.v = placed(a.v, 8);
  op.cu_seqlens = placed(a.cu_seqlens_q, 9);
  op.seqused_kv = placed(a.seqused_kv, 10);
  op.cache = placed(a.cache);
  return op;
}

attune_qkv_prepare latent_prepare(const PopularModel& m, const Serving& s) {
  attune_qkv_prepare op;
  attune_qkv_prepare_init(&op, sizeof(op));
  op.q = op.q_out = placed(tensor(s.activations, {s.batch * s.queries, m.num_heads_q, m.head_dim_qk}), 6);
  op.k = placed(tensor(s.activations, {s.batch * s.queries, 1, m.head_dim_qk}), 7);
  op.cu_seqlens_q = placed(tensor(ATTUNE_INT32, {s.batch + 1}), 9);
  op.seqused_kv = placed(tensor(ATTUNE_INT32, {s.batch}), 10);
  op.cache = latent_cache(m, s);
  op.prologue.append = 1;
  op.prologue.rope_cos_sin = placed(tensor(ATTUNE_FLOAT32, {s.keys + s.queries, m.rope_dim}), 11);
  op.prologue.rope_offset = m.rope_offset;
  op.prologue.rope_interleaved = m.rope_interleaved ? 1 : 0;
  return op;
}

attune_cache_op latent_cache_op(const PopularModel& m, const Serving& s, attune_cache_op_kind kind) {
  attune_cache_op op;
  attune_cache_op_init(&op, sizeof(op));
  op.kind = kind;
  op.k = placed(tensor(s.activations, {s.batch * s.queries, 1, m.head_dim_qk}), 7);
  op.cu_seqlens = placed(tensor(ATTUNE_INT32, {s.batch + 1}), 9);
  op.seqused_kv = placed(tensor(ATTUNE_INT32, {s.batch}), 10);
  op.cache = latent_cache(m, s);
  return op;
}

attune_indexer indexer_call(int64_t batch, int64_t queries, int64_t keys, bool ragged) {
  constexpr int64_t kHeads = 64, kHeadDim = 128;
  const int64_t pages = (keys + kPageSize - 1) / kPageSize, rows = batch * queries;
  attune_indexer op;
  attune_indexer_init(&op, sizeof(op));
  op.causal = 1;
  op.q = tensor(ATTUNE_FLOAT8_E4M3, {rows, kHeads, kHeadDim});
  op.q_scale = op.weights = tensor(ATTUNE_FLOAT32, {rows, kHeads});
  if (ragged) op.cu_seqlens_q = tensor(ATTUNE_INT32, {batch + 1});
  op.seqused_kv = tensor(ATTUNE_INT32, {batch});
  op.cache.k = tensor(ATTUNE_FLOAT8_E4M3, {batch * pages, kPageSize, 1, kHeadDim});
  op.cache.k_scale = tensor(ATTUNE_FLOAT32, {batch * pages, kPageSize, 1});
  op.cache.page_table = tensor(ATTUNE_INT32, {batch, pages});
  op.indices = tensor(ATTUNE_INT32, {rows, kTopk});
  return op;
}

attune_attention latent_call(const PopularModel& m, const Serving& s) {
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  const int64_t rows = s.batch * s.queries;
  a.q = placed(tensor(s.activations, {rows, m.num_heads_q, m.head_dim_qk}), 1);
  a.out = placed(tensor(s.activations, {rows, m.num_heads_q, m.head_dim_v}), 2);
  a.head_dim_v = m.head_dim_v;
  a.cu_seqlens_q = placed(tensor(ATTUNE_INT32, {s.batch + 1}), 3);
  if (m.packed_cache) {
    a.k = placed(tensor(s.activations, {s.keys, 1, m.head_dim_qk}), 4);
    a.cu_seqlens_kv = a.cu_seqlens_q;
    a.indices = placed(tensor(ATTUNE_INT32, {rows, kTopk}), 5);
  } else {
    a.cache = latent_cache(m, s);
    a.seqused_kv = placed(tensor(ATTUNE_INT32, {s.batch}), 6);
    a.causal = 1;
  }
  return a;
}

attune_attention fused_latent_call(const PopularModel& m, const Serving& s) {
  attune_attention a = latent_call(m, s);
  const attune_qkv_prepare op = latent_prepare(m, s);
  a.k = op.k;
  a.prologue = op.prologue;
  return a;
}

attune_attention shard_call(const PopularModel& m, const Serving& s, int64_t shards) {
  const int64_t heads = m.num_heads_q / shards;
  attune_attention a;
  attune_attention_init(&a, sizeof(a));
  a.q = placed(tensor(s.activations, {s.batch, 1, heads, m.head_dim_qk}), 1);
  a.out = placed(tensor(s.activations, {s.batch, 1, heads, m.head_dim_v}), 2);
  a.head_dim_v = m.head_dim_v;
  a.cache = latent_cache(m, s);
  if (m.packed_cache) {
    a.cache.page_table = {};  // slots are named by the lists
    a.indices = placed(tensor(ATTUNE_INT32, {s.batch, 1, kTopk}), 5);
  } else {
    a.seqused_kv = placed(tensor(ATTUNE_INT32, {s.batch}), 6);
    a.causal = 1;
  }
  return a;
}

}  // namespace attune::bundle
