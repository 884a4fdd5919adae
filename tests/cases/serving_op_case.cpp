// SPDX-License-Identifier: Apache-2.0
// Random batches of the operations beside attention.
#include <algorithm>

#include "serving_draw.h"

namespace attune::cases {
namespace {

const std::vector<attune_dtype> kFloats = {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16};

// --- qkv_prepare

// Every axis of the prologue; what attention alone has is left out.
void draw_any_prologue(Random& r, Case& c) {
  do {
    c = random_case(r.next());
  } while (!c.new_tokens);
  static_cast<MaskSpec&>(c) = {};
  static_cast<ScoreSpec&>(c) = {};
  c.skip_decode = c.out_scale = c.max_logits = false;
}

void draw_prologue(Random& r, Case& c) {
  c.causal = true;
  c.new_tokens = true;
  c.num_heads_kv = r.pick<int64_t>({1, 1, 2, 8});
  c.num_heads_q = c.num_heads_kv * r.pick<int64_t>({1, 4, 8});
  c.head_dim_qk = c.head_dim_v = r.pick<int64_t>({128, 128, 64, 40, 256});
  c.dtype = r.pick<attune_dtype>({ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT16, ATTUNE_FLOAT32});
  draw_plain_cache(r, c);
  const bool packed = r.chance(0.25), codes = !packed && r.chance(0.15);
  if (packed) {
    c.kv = KvSource::kPaged;
    c.cache = CacheSpec{};
    c.num_heads_q = r.pick<int64_t>({8, 16, 128});
    draw_packed(r, c);
  }
  PrologueSpec& p = c.prologue;
  p.append = r.chance(0.85);
  p.power_of_two_scales = p.append && c.cache.writes_scales() && r.chance(0.3);
  p.q_bias = r.chance(0.2), p.k_bias = r.chance(0.2);
  p.v_bias = !c.shared_kv && r.chance(0.2);
  if (r.chance(0.1)) p.logn = 16;
  if (codes) {
    c.dtype = ATTUNE_FLOAT8_E4M3;
    c.cache.layout = ATTUNE_KV_NHD;
    p.qkv_scale = true;
  }
  if (r.chance(0.8)) {
    p.rope.style = ATTUNE_ROPE_LINEAR;
    p.rope.dim = packed ? 64 : std::min<int64_t>(c.head_dim_qk / 8 * 8, r.pick<int64_t>({64, 128}));
    p.rope.offset = packed || r.chance(0.2) ? c.head_dim_qk - p.rope.dim : 0;
    p.rope.interleaved = r.chance(0.3);
    p.rope.max_position = 1 << 14;
  }
}

void draw_prepare(Random& of_configuration, Random& r, Case& c, int64_t budget) {
  const bool any = of_configuration.chance(0.3);
  any ? draw_any_prologue(of_configuration, c) : draw_prologue(of_configuration, c);
  c.op.operation = Operation::kPrepare;
  const bool codes = element_size(c.dtype) == 1;
  c.op.outputs = of_configuration.pick<Outputs>({Outputs::kElsewhere, Outputs::kInPlace, Outputs::kOnlyQInPlace});
  if (codes) c.op.outputs = Outputs::kElsewhere;
  c.out_dtype = of_configuration.pick(kFloats);
  if (any) {
    draw_any_lengths(r, c, budget);
  } else {
    draw_lengths(r, c, r.pick<Kind>({Kind::kDecode, Kind::kMixed, Kind::kChunk}), budget);
    // Also fewer than the new tokens: no key is read here.
    if (r.chance(0.2)) c.cache.ring_capacity = r.integer(1, 300);
  }
}

// --- Cache operations

void draw_cache_format(Random& r, Case& c) {
  c.dtype = r.pick(kFloats);
  if (r.chance(0.3)) {
    draw_packed(r, c);
  } else {
    c.cache.dtype = r.pick<attune_dtype>(
        {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8});
    c.cache.layout = r.pick<attune_kv_layout>({ATTUNE_KV_NHD, ATTUNE_KV_HND, ATTUNE_KV_XPACKED});
    c.num_heads_kv = r.integer(1, 5);
    c.head_dim_qk = c.head_dim_v = r.pick<int64_t>({1, 8, 40, 64, 96, 128, 192, 250, 256});
    if (c.cache.layout == ATTUNE_KV_XPACKED && c.head_dim_qk % (16 / element_size(c.cache.dtype)) != 0)
      c.cache.layout = ATTUNE_KV_HND;
    if (element_size(c.cache.dtype) == 1) c.cache.scales = draw_scales(r, c.cache.dtype);
  }
  c.strides = r.chance(0.6) ? StrideMode::kDense : StrideMode::kOdd;
  c.op.operation = Operation::kCacheOp;
}

attune_cache_op_kind draw_kind(Random& r, bool stores, bool by_slots) {
  if (!by_slots || r.chance(0.5)) return stores ? ATTUNE_CACHE_APPEND : ATTUNE_CACHE_GATHER;
  return stores ? ATTUNE_CACHE_QUANTIZE : ATTUNE_CACHE_DEQUANTIZE;
}

void draw_cache_op(Random& of_configuration, Random& r, Case& c, int64_t budget) {
  draw_cache_format(of_configuration, c);
  const bool plain = c.cache.format == ATTUNE_KV_PLAIN, stores = of_configuration.chance(0.5);
  // V as a part of K, as the indexer's caches are.
  if (plain && c.cache.layout != ATTUNE_KV_XPACKED) c.shared_kv = of_configuration.chance(0.2);
  if (plain && !c.shared_kv && of_configuration.chance(0.2)) c.head_dim_v = c.head_dim_qk > 64 ? 64 : c.head_dim_qk;
  c.kv = r.pick<KvSource>({KvSource::kPaged, KvSource::kPaged, KvSource::kContiguous, KvSource::kSlots});
  if (c.kv == KvSource::kContiguous && c.cache.format == ATTUNE_KV_MLA_584) c.kv = KvSource::kPaged;
  const bool by_slots = c.kv == KvSource::kSlots;
  c.op.cache_op = draw_kind(r, stores, by_slots);
  c.prologue.power_of_two_scales = stores && c.cache.writes_scales() && r.chance(0.3);
  c.cache.page_size = r.pick<int64_t>({1, 3, 16, 16, 24, 64});
  c.cache.separate_v_table = r.chance(0.15);
  c.cache.batch_index = r.chance(0.3);
  c.op.any_contents = r.chance(0.2);
  const bool decode = stores && r.chance(0.4);
  c.queries = decode && !by_slots && r.chance(0.5) ? QueryShape::kFlat : QueryShape::kRagged;
  const int64_t most_sequences = r.pick<int64_t>({1, 3, 20, 100, 400}), longest = r.pick<int64_t>({70, 600, 3000});
  const int64_t width = std::max<int64_t>(1, c.num_heads_kv * c.head_dim_qk / 256);
  int64_t cost = 0;
  for (int64_t b = 0; b < most_sequences && cost < budget; ++b) {
    const int64_t n_kv = by_slots ? 0 : std::min(draw_length(r, longest), budget / width + 1);
    int64_t n_q = std::min(draw_length(r, longest), budget / width + 1);
    if (decode) n_q = 1;
    if (!stores && !by_slots) n_q = r.chance(0.7) ? n_kv : r.integer(0, n_kv + 5);
    c.seqlens_q.push_back(n_q);
    c.seqlens_kv.push_back(n_kv);
    cost += (n_q + n_kv) * width;
  }
  if (!by_slots && r.chance(0.2)) c.cache.ring_capacity = r.integer(1, longest);
  if (stores && !by_slots && r.chance(0.2)) {
    for (int64_t b = 0; b < c.batch(); ++b) c.finished.push_back(r.chance(0.2) ? 1 : 0);
  }
}

// --- Merge

void draw_merge(Random& of_configuration, Random& r, Case& c, int64_t budget) {
  c.op.operation = Operation::kMerge;
  c.dtype = of_configuration.pick(kFloats);
  c.out_dtype =
      of_configuration.pick<attune_dtype>({ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3});
  c.head_dim_v = of_configuration.pick<int64_t>({1, 17, 40, 64, 128, 128, 256, 512, 576});
  c.strides = of_configuration.chance(0.7) ? StrideMode::kDense : StrideMode::kOdd;
  c.num_heads_q = r.pick<int64_t>({1, 3, 8, 16, 64, 128});
  c.op.parts = r.pick<int64_t>({1, 2, 3, 7, 8, 16, 33, 64, 150});
  c.lse = r.chance(0.7);
  if (r.chance(0.3)) c.sinks = "normal";
  const int64_t most_sequences = r.pick<int64_t>({1, 3, 20, 100, 400}), longest = r.pick<int64_t>({1, 70, 600});
  const int64_t row = c.op.parts * c.num_heads_q * c.head_dim_v, most = 256 * budget;
  int64_t cost = 0;
  for (int64_t b = 0; b < most_sequences && cost < most; ++b) {
    c.seqlens_q.push_back(std::min(longest == 1 ? 1 : draw_length(r, longest), most / row + 1));
    c.seqlens_kv.push_back(0);
    cost += c.seqlens_q.back() * row;
  }
}

}  // namespace

Case serving_op_case(Random& r, uint64_t configuration, int64_t budget) {
  Random of_configuration("serving operation", configuration);
  Case c;
  const double which = of_configuration.uniform();
  if (which < 0.4) {
    draw_prepare(of_configuration, r, c, budget);
  } else if (which < 0.8) {
    draw_cache_op(of_configuration, r, c, budget);
  } else {
    draw_merge(of_configuration, r, c, budget);
  }
  return c;
}

Case random_cache_op_case(uint64_t seed, Formats formats) {
  Random r("random cache op", seed);
  Case c;
  c.area = "random";
  c.name = "random/cache_op/" + std::to_string(seed);
  draw_cache_format(r, c);
  if (formats == Formats::kPacked && c.cache.format == ATTUNE_KV_PLAIN) {
    c.cache = CacheSpec{};
    draw_packed(r, c);
  }
  c.op.any_contents = true;
  c.op.infinities = c.cache.format != ATTUNE_KV_PLAIN;
  c.op.pages = r.integer(1, 6);
  c.cache.page_size = r.pick<int64_t>({1, 3, 4, 16});
  const bool by_slots = r.chance(0.4), stores = r.chance(0.5);
  c.op.cache_op = draw_kind(r, stores, by_slots);
  c.prologue.power_of_two_scales = c.cache.writes_scales() && r.chance(0.5);
  if (by_slots) {
    const bool whole = c.op.cache_op == ATTUNE_CACHE_QUANTIZE || c.op.cache_op == ATTUNE_CACHE_DEQUANTIZE;
    c.kv = KvSource::kSlots;
    c.seqlens_q = {r.integer(1, whole ? c.op.pages * c.cache.page_size : 90)};
    c.seqlens_kv = {0};
    return c;
  }
  const int64_t batch = r.integer(1, 5);
  const bool contiguous = c.op.pages >= batch && r.chance(0.4);
  c.kv = contiguous ? KvSource::kContiguous : KvSource::kPaged;
  c.op.columns = contiguous ? 1 : r.integer(1, 4);
  const int64_t holds = c.op.columns * c.cache.page_size;
  if (r.chance(0.4)) c.cache.ring_capacity = r.integer(1, holds);
  for (int64_t b = 0; b < batch; ++b) {
    c.seqlens_q.push_back(r.integer(b == 0 ? 1 : 0, 90 / batch));
    c.seqlens_kv.push_back(r.integer(0, holds + 3));
  }
  if (batch == 1 && r.chance(0.5)) c.queries = QueryShape::kFlat;
  if (r.chance(0.5)) {
    for (int64_t b = 0; b < batch; ++b) c.finished.push_back(r.integer(0, 1));
  }
  return c;
}

}  // namespace attune::cases
