// SPDX-License-Identifier: Apache-2.0
// Random valid cases: every axis is drawn on its own, then what does not go together is left out. Over a few hundred
// seeds all pairs of values of the main axes occur together.
#include <algorithm>

#include "serving_draw.h"

namespace attune::cases {

void draw_packed(Random& r, Case& c) {
  const bool is_656 = r.chance(0.5);
  c.cache.format = is_656 ? ATTUNE_KV_MLA_656 : ATTUNE_KV_MLA_584;
  c.cache.layout = ATTUNE_KV_BYTES;
  c.shared_kv = true;
  c.num_heads_kv = 1;
  c.head_dim_qk = is_656 ? 576 : 512;
  c.head_dim_v = 512;
}

namespace {

void draw_shape(Random& r, Case& c) {
  c.dtype = r.pick<attune_dtype>({ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_BFLOAT16});
  c.num_heads_kv = r.pick<int64_t>({1, 1, 2, 3});
  c.num_heads_q = c.num_heads_kv * r.pick<int64_t>({1, 1, 2, 3, 4, 7, 8});
  c.head_dim_qk = r.pick<int64_t>({8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 128, 192, 256});
  c.head_dim_v = r.chance(0.8) ? c.head_dim_qk : r.pick<int64_t>({8, 16, 32, 64, 128});
  const int64_t batch = r.pick<int64_t>({1, 1, 2, 3, 5});
  c.queries = r.pick<QueryShape>({QueryShape::kRagged, QueryShape::kRagged, QueryShape::kFixed});
  const bool decode = r.chance(0.4);
  const int64_t fixed = decode ? 1 : r.integer(1, 40);
  const auto length = [&](int64_t most) {
    const int64_t edges[] = {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257};
    const int64_t n = r.chance(0.4) ? edges[r.integer(0, 16)] : r.integer(0, most);
    return std::min(n, most);
  };
  const int64_t most = r.pick<int64_t>({20, 70, 150, 300});
  for (int64_t b = 0; b < batch; ++b) {
    c.seqlens_q.push_back(c.queries == QueryShape::kFixed ? fixed : decode ? 1 : length(48));
    c.seqlens_kv.push_back(length(most));
  }
  c.strides = r.pick<StrideMode>({StrideMode::kDense, StrideMode::kDense, StrideMode::kOdd, StrideMode::kTransposed});
}

void draw_source(Random& r, Case& c) {
  c.kv = r.pick<KvSource>({KvSource::kDense, KvSource::kPaged, KvSource::kPaged, KvSource::kPaged,
                           KvSource::kContiguous, KvSource::kSlots});
  if (c.kv == KvSource::kDense) {
    c.seqused = r.chance(0.3);
    return;
  }
  CacheSpec& cache = c.cache;
  cache.page_size = r.pick<int64_t>({1, 3, 8, 16, 16, 32, 64, 100});
  cache.page_padding = r.chance(0.3);
  cache.dtype =
      r.pick<attune_dtype>({ATTUNE_DTYPE_NONE, ATTUNE_DTYPE_NONE, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8});
  if (cache.dtype != ATTUNE_DTYPE_NONE) {
    cache.scales = draw_scales(r, cache.dtype);
  }
  cache.layout = r.pick<attune_kv_layout>({ATTUNE_KV_NHD, ATTUNE_KV_HND, ATTUNE_KV_XPACKED});
  const bool alias = r.chance(0.1) && c.head_dim_v <= c.head_dim_qk;
  if (alias) {
    c.shared_kv = true;
    if (cache.layout == ATTUNE_KV_XPACKED) cache.layout = ATTUNE_KV_NHD;
  }
  if (cache.layout == ATTUNE_KV_XPACKED && c.head_dim_qk % (16 / element_size(c.cache_dtype())) != 0)
    cache.layout = ATTUNE_KV_HND;
  if (r.chance(0.12) && c.kv != KvSource::kContiguous) {
    cache = CacheSpec{};
    draw_packed(r, c);
    cache.page_size = r.pick<int64_t>({1, 16, 64});
    c.num_heads_q = std::min<int64_t>(c.num_heads_q, 4);
  }
  if (c.kv == KvSource::kSlots) {
    // Indices beside a rank 4 q have no axis for KV heads.
    if (c.queries == QueryShape::kFixed) c.num_heads_kv = 1;
    const auto draw = [&](SparseSpec& sparse) {
      sparse.topk = r.pick<int64_t>({1, 7, 16, 33, 64, 100});
      sparse.lengths = r.pick<Lengths>({Lengths::kNone, Lengths::kBatch, Lengths::kToken});
      sparse.per_head = c.queries == QueryShape::kRagged && r.chance(0.3);
      sparse.slots = r.pick<int64_t>({40, 100});
    };
    draw(c.sparse);
    if (r.chance(0.4)) draw(c.extra);
    return;
  }
  if (c.kv == KvSource::kPaged) {
    cache.separate_v_table = !c.shared_kv && r.chance(0.2);
    cache.share_prefix = r.chance(0.2);
    cache.one_pool = !c.shared_kv && cache.layout != ATTUNE_KV_XPACKED && r.chance(0.2);
  } else {
    cache.batch_index = r.chance(0.5);
  }
  c.new_tokens = r.chance(0.5);
  if (c.new_tokens && r.chance(0.1) && c.max_seqlen_q() <= 8 && cache.format == ATTUNE_KV_PLAIN) {
    cache.share_prefix = false;
    cache.ring_capacity = r.pick<int64_t>({16, 33, 64});
  }
}

void draw_score(Random& r, Case& c) {
  if (r.chance(0.2)) c.softcap = r.pick<double>({1.5, 8, 30});
  if (r.chance(0.2)) c.softmax_scale = r.uniform(0.02, 0.3);
  if (r.chance(0.25)) c.sinks = r.pick<std::string>({"normal", "mixed"});
  c.aux_dtype = r.pick<std::string>({"f32", "f32", "bf16", "f16"});
  if (c.kv == KvSource::kSlots) return;  // no positions, no biases
  if (r.chance(0.2)) {
    c.alibi = static_cast<int>(r.integer(1, 2));
    c.alibi_sqrt = r.chance(0.2);
    c.alibi_negative = r.chance(0.2);
  }
  // A table must cover every position, and with more queries than keys positions are negative.
  bool negative = false;
  for (int64_t b = 0; b < c.batch(); ++b) negative |= c.keys(b) < c.seqlens_q[static_cast<size_t>(b)];
  if (r.chance(0.1) && !negative) c.bias = static_cast<int>(r.integer(1, 2));
  if (r.chance(0.1)) c.t5_buckets = r.pick<int64_t>({8, 32});
  if (r.chance(0.1) && c.new_tokens && c.causal && c.max_seqlen_q() > 0) c.new_token_bias = true;
}

void draw_prologue(Random& r, Case& c) {
  if (!c.has_cache() || c.kv == KvSource::kSlots || !r.chance(0.5)) return;
  PrologueSpec& p = c.prologue;
  p.append = c.new_tokens && r.chance(0.7);
  p.q_bias = r.chance(0.3);
  p.k_bias = c.new_tokens && r.chance(0.3);
  p.v_bias = c.new_tokens && !c.shared_kv && r.chance(0.3);
  if (c.new_tokens && !c.shared_kv && r.chance(0.2)) p.ia3_tasks = r.integer(1, 3);
  if (r.chance(0.2)) p.logn = 16;
  if (r.chance(0.5)) {
    RopeSpec& rope = p.rope;
    rope.style = static_cast<int32_t>(r.integer(ATTUNE_ROPE_LINEAR, ATTUNE_ROPE_LLAMA3));
    rope.dim = std::min<int64_t>(c.head_dim_qk, r.pick<int64_t>({8, 16, 64, 128}));
    rope.offset = r.chance(0.3) ? c.head_dim_qk - rope.dim : 0;
    rope.interleaved = r.chance(0.4);
    rope.scale = r.pick<double>({1, 4});
    rope.tables = r.chance(0.2) ? 2 : 1;
    rope.positions = r.chance(0.3) ? 1 : 0;
  }
  p.power_of_two_scales = p.append && c.cache.writes_scales() && r.chance(0.3);
}

}  // namespace

Case random_case(uint64_t seed) {
  Random r("random case", seed);
  Case c;
  c.area = "random";
  c.name = "random/" + std::to_string(seed);
  draw_shape(r, c);
  draw_source(r, c);
  draw_mask(r, c);
  draw_score(r, c);
  draw_prologue(r, c);
  if (r.chance(0.15)) {
    for (int64_t b = 0; b < c.batch(); ++b) c.finished.push_back(r.chance(0.3) ? 1 : 0);
    c.zero_finished = r.chance(0.5);
  }
  c.skip_decode = r.chance(0.05);
  if (r.chance(0.3))
    c.out_dtype = r.pick<attune_dtype>({ATTUNE_FLOAT32, ATTUNE_BFLOAT16, ATTUNE_FLOAT16, ATTUNE_FLOAT8_E4M3});
  c.out_scale = c.out_dtype == ATTUNE_FLOAT8_E4M3 && r.chance(0.5);
  c.lse = r.chance(0.8);
  c.max_logits = r.chance(0.3);
  c.batch_invariant = r.chance(0.2);
  c.max_seqlens = r.chance(0.2);
  return c;
}

Case random_indexer_case(uint64_t seed) {
  Random r("random indexer case", seed);
  Case c;
  c.area = "indexer";
  c.name = "indexer/random/" + std::to_string(seed);
  draw_shape(r, c);
  c.num_heads_kv = 1;
  c.num_heads_q = r.pick<int64_t>({1, 2, 3, 8, 32, 64, 65});
  c.head_dim_v = c.head_dim_qk;
  c.shared_kv = true;
  c.dtype = r.pick<attune_dtype>({ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3,
                                  ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8});
  // Keys that every row would take say little: longer sequences than attention's.
  for (int64_t& n : c.seqlens_kv) n = r.chance(0.5) ? n : n + r.integer(0, 700);
  c.kv = r.chance(0.8) ? KvSource::kPaged : KvSource::kContiguous;
  CacheSpec& cache = c.cache;
  cache.page_size = r.pick<int64_t>({1, 3, 16, 64, 64, 100, 256});
  cache.page_padding = r.chance(0.3);
  cache.dtype = r.pick<attune_dtype>(
      {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E4M3, ATTUNE_INT8});
  if (element_size(cache.dtype) == 1) {
    cache.scales =
        r.pick<ScaleMode>({ScaleMode::kTensor, ScaleMode::kHead, ScaleMode::kTokenHead, ScaleMode::kTokenHead});
  }
  cache.layout = r.pick<attune_kv_layout>({ATTUNE_KV_NHD, ATTUNE_KV_NHD, ATTUNE_KV_HND, ATTUNE_KV_XPACKED});
  if (c.head_dim_qk % 16 != 0 && cache.layout == ATTUNE_KV_XPACKED) cache.layout = ATTUNE_KV_HND;
  cache.share_prefix = c.kv == KvSource::kPaged && r.chance(0.2);
  cache.batch_index = c.kv == KvSource::kContiguous && r.chance(0.5);
  c.causal = r.chance(0.7);
  if (r.chance(0.3)) c.window_left = r.pick<int64_t>({0, 1, 127, 200});
  if (r.chance(0.3)) c.window_right = r.pick<int64_t>({0, 1, 17});
  if (r.chance(0.2)) c.data = "equal";
  c.max_seqlens = r.chance(0.2);
  IndexerSpec& spec = c.indexer;
  spec.topk = r.pick<int64_t>({1, 2, 7, 64, 65, 128, 200, 1000});
  spec.positions = r.chance(0.3);
  spec.slot_page_size = r.pick<int64_t>({0, 0, 1, 16, 48});
  spec.bad_pages = r.chance(0.3);
  spec.q_scale = r.chance(0.5);
  spec.clear = r.chance(0.3);
  spec.lengths = r.chance(0.8);
  spec.weights = r.pick<std::string>({"f32", "f32", "bf16", "f16"});
  return c;
}

}  // namespace attune::cases
