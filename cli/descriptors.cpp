// SPDX-License-Identifier: Apache-2.0
#include "descriptors.h"

namespace attune::cli {
namespace {

attune_tensor ints(Shape shape) { return dense(static_cast<const int32_t*>(nullptr), shape); }

void set_queries(Attention& a, const Model& m, KvDtype kv, const CallShape& shape) {
  const attune_dtype dtype = activation_dtype(kv);
  a.q = dense(nullptr, dtype, {shape.rows, m.num_heads_q, m.head_dim_qk});
  a.out = dense(nullptr, dtype, {shape.rows, m.num_heads_q, m.head_dim_v});
  a.max_seqlen_q = shape.max_seqlen_q;
  a.max_seqlen_kv = shape.max_seqlen_kv;
}

template <typename Descriptor>
void set_new_tokens(Descriptor& d, const Model& m, KvDtype kv, const CallShape& shape) {
  const attune_dtype dtype = activation_dtype(kv);
  d.k = dense(nullptr, dtype, {shape.rows, m.num_heads_kv, m.head_dim_qk});
  if (!m.is_mla()) d.v = dense(nullptr, dtype, {shape.rows, m.num_heads_kv, m.head_dim_v});
}

template <typename Descriptor>
void set_cache(Descriptor& d, const attune_kv_cache& cache, const CallShape& shape) {
  d.cu_seqlens_q = ints({shape.batch + 1});
  d.cache = cache;
  d.cache.page_table = ints({shape.batch, shape.max_pages});
  d.seqused_kv = ints({shape.batch});
}

}  // namespace

Attention decoder_call(const Model& model, KvDtype kv, const LayerParameters& layer, const attune_kv_cache& cache,
                       int64_t kind, const CallShape& shape) {
  Attention a;
  set_queries(a, model, kv, shape);
  set_new_tokens(a, model, kv, shape);
  set_cache(a, cache, shape);
  layer.apply_decoder(a, kind);
  a.prologue.append = 1;
  return a;
}

QkvPrepare prepare_call(const Model& model, KvDtype kv, const LayerParameters& layer, const attune_kv_cache& cache,
                        const CallShape& shape) {
  QkvPrepare op;
  op.q = op.q_out = dense(nullptr, activation_dtype(kv), {shape.rows, model.num_heads_q, model.head_dim_qk});
  set_new_tokens(op, model, kv, shape);
  set_cache(op, cache, shape);
  layer.apply_rope(op.prologue);
  op.prologue.append = 1;
  return op;
}

Attention sparse_call(const Model& model, KvDtype kv, const LayerParameters& layer, const attune_kv_cache& cache,
                      const CallShape& shape) {
  Attention a;
  set_queries(a, model, kv, shape);
  a.max_seqlen_q = 1;  // each row has a list of its own
  a.max_seqlen_kv = model.topk;
  a.cache = cache;
  a.indices = ints({shape.rows, model.topk});
  a.topk_length = ints({shape.rows});
  layer.apply_cross(a);
  return a;
}

Attention encoder_call(const Model& model, KvDtype kv, const LayerParameters& layer, const CallShape& shape) {
  Attention a;
  set_queries(a, model, kv, shape);
  set_new_tokens(a, model, kv, shape);
  a.cu_seqlens_q = ints({shape.batch + 1});
  layer.apply_encoder(a);
  return a;
}

Attention cross_call(const Model& model, KvDtype kv, const LayerParameters& layer, const attune_kv_cache& cache,
                     const CallShape& shape) {
  Attention a;
  set_queries(a, model, kv, shape);
  set_cache(a, cache, shape);
  layer.apply_cross(a);
  return a;
}

std::string layer_kind_name(const Model& model, int64_t kind) {
  if (model.windows.size() == 1) return "";
  const int64_t window = model.windows[static_cast<size_t>(kind)];
  return window == 0 ? "full" : "window " + std::to_string(window);
}

}  // namespace attune::cli
