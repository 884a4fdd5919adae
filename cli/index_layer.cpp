// SPDX-License-Identifier: Apache-2.0
#include "index_layer.h"

#include <cstring>

namespace attune::cli {
namespace {

// Codes spread over most of e4m3's range; scores get a deviation of about 1, as a softmax scale in the weights would.
constexpr double kCodeDeviation = 64;

}  // namespace

IndexLayer::IndexLayer(const RunnerConfig& config, cases::Random& random)
    : model_(config.model),
      limits_(config.limits),
      device_(config.device),
      codes_(static_cast<size_t>(limits_.num_pages * limits_.page_size * model_.index_head_dim)),
      scales_(static_cast<size_t>(limits_.num_pages * limits_.page_size) * sizeof(float)),
      q_(ATTUNE_FLOAT8_E4M3, limits_.max_rows, model_.index_heads, model_.index_head_dim, kCodeDeviation, random),
      weights_(ATTUNE_FLOAT32, limits_.max_rows, 1, model_.index_heads, 1 / kCodeDeviation, random),
      keys_(activation_dtype(config.kv_dtype), limits_.max_rows, 1, model_.index_head_dim, 1.0, random),
      seqlens_(static_cast<size_t>(limits_.max_batch)) {
  std::memset(codes_.data(), 0xff, codes_.size());  // NaN, as code and as scale
  std::memset(scales_.data(), 0xff, scales_.size());
  if (!limits_.decode_only) return;
  fill_normal(ATTUNE_FLOAT8_E4M3, codes_.data(), static_cast<int64_t>(codes_.size()), kCodeDeviation, random);
  for (size_t i = 0; i < scales_.size() / sizeof(float); ++i)
    scales_.as<float>()[i] = static_cast<float>(random.uniform(0.5, 1.5) / kCodeDeviation);
}

attune_kv_cache IndexLayer::cache(const BatchTables& tables) const {
  attune_kv_cache c{};
  c.k = dense(codes_.data(), ATTUNE_FLOAT8_E4M3, {limits_.num_pages, limits_.page_size, 1, model_.index_head_dim});
  c.k_scale = dense(scales_.as<float>(), {limits_.num_pages, limits_.page_size, 1});
  c.page_table = tables.page_table();
  return c;
}

CacheOp IndexLayer::append(const BatchTables& tables, cases::Random& random) const {
  CacheOp op(ATTUNE_CACHE_APPEND);
  op.power_of_two_scales = 1;  // as the model's own code writes them
  op.cache = cache(tables);
  op.cu_seqlens = tables.cu_seqlens();
  op.seqused_kv = tables.seqused();
  op.k = keys_.take(tables.rows(), random);
  return op;
}

Indexer IndexLayer::choose(const BatchTables& tables, int32_t* indices, int32_t* lengths, cases::Random& random) {
  const attune_tensor offsets = tables.cu_seqlens(), cached = tables.seqused();
  const auto* begin = static_cast<const int32_t*>(offsets.data);
  for (int64_t b = 0; b < tables.batch(); ++b)
    seqlens_[static_cast<size_t>(b)] = static_cast<const int32_t*>(cached.data)[b] + begin[b + 1] - begin[b];
  Indexer op;
  op.causal = 1;
  op.q = q_.take(tables.rows(), random);
  op.weights = weights_.take(tables.rows(), random);
  op.weights = dense(op.weights.data, ATTUNE_FLOAT32, {tables.rows(), model_.index_heads});
  op.cu_seqlens_q = offsets;
  op.cache = cache(tables);
  op.seqused_kv = dense(seqlens_.data(), {tables.batch()});
  op.indices = dense(indices, {tables.rows(), model_.topk});
  op.topk_length = dense(lengths, {tables.rows()});
  op.max_seqlen_kv = limits_.max_seqlen;
  return op;
}

double IndexLayer::run(const Indexer& op, DeviceMirror& mirror) {
  const size_t bytes = op.workspace_size(device_);
  if (device_.type == ATTUNE_DEVICE_CPU && bytes > workspace_.size()) workspace_ = Buffer(bytes);
  return mirror.choose(op, workspace_.data(), bytes);
}

}  // namespace attune::cli
