// SPDX-License-Identifier: Apache-2.0
// Random valid cases of latent caches: one KV row that is key and value, of 576 or 512 channels, in 16 bits or packed,
// dense and sparse. random_case.cpp rarely draws one.
#include <algorithm>

#include "case.h"
#include "number.h"

namespace attune::cases {
namespace {

enum class Keys { kPlain, k656, k584 };

void draw_rows(Random& r, Case& c, Keys keys) {
  c.dtype = keys == Keys::kPlain && r.chance(0.25) ? ATTUNE_FLOAT16 : ATTUNE_BFLOAT16;
  c.head_dim_qk = keys == Keys::k656 ? 576 : keys == Keys::k584 ? 512 : r.pick<int64_t>({576, 576, 512});
  c.head_dim_v = 512;
  c.shared_kv = true;
  c.num_heads_kv = keys == Keys::kPlain ? r.pick<int64_t>({1, 1, 1, 2, 3}) : 1;
  const int64_t group =
      r.pick<int64_t>({1, 2, 3, 5, 7, 8, 11, 12, 15, 16, 16, 17, 20, 24, 32, 33, 40, 48, 63, 64, 65, 96, 128, 128});
  c.num_heads_q = c.num_heads_kv * (c.num_heads_kv > 1 ? std::min<int64_t>(group, 40) : group);
  const int64_t batch = r.integer(1, 4);
  c.queries = r.chance(0.3) ? QueryShape::kFixed : QueryShape::kRagged;
  const bool decode = r.chance(0.4);
  const int64_t fixed = decode ? 1 : r.integer(1, 16);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t tokens = decode ? 1 : r.pick<int64_t>({0, 1, 1, 2, 3, 5, 9});
    c.seqlens_q.push_back(c.queries == QueryShape::kFixed ? fixed : tokens);
    c.seqlens_kv.push_back(r.pick<int64_t>({0, 1, 9, 63, 64, 65, 127, 128, 200, 333}));
  }
}

SparseSpec draw_list(Random& r, const Case& c) {
  SparseSpec list;
  list.topk = r.pick<int64_t>({1, 7, 63, 64, 65, 130, 200, 450});
  list.lengths = r.pick<Lengths>({Lengths::kNone, Lengths::kBatch, Lengths::kToken});
  list.invalid = r.pick<double>({0, 0.1, 0.9, 1});
  list.slots = r.pick<int64_t>({70, 300, 1000});
  list.per_head = c.num_heads_kv > 1 && c.queries == QueryShape::kRagged && r.chance(0.5);
  return list;
}

void draw_cache(Random& r, Case& c, Keys keys) {
  CacheSpec& cache = c.cache;
  cache.page_size = r.pick<int64_t>({1, 3, 8, 16, 48, 64, 64, 100, 256, 1024});
  if (keys != Keys::kPlain) {
    cache.format = keys == Keys::k656 ? ATTUNE_KV_MLA_656 : ATTUNE_KV_MLA_584;
    cache.layout = ATTUNE_KV_BYTES;
    cache.page_padding = r.chance(0.3);
  } else if (c.kv == KvSource::kPaged && r.chance(0.3)) {
    cache.layout = ATTUNE_KV_HND;
  }
  cache.share_prefix = c.kv == KvSource::kPaged && r.chance(0.2);
  cache.batch_index = c.kv == KvSource::kContiguous && r.chance(0.4);
}

void draw_new_tokens(Random& r, Case& c) {
  if (!r.chance(0.35)) return;
  c.new_tokens = true;
  c.cache.share_prefix = false;
  if (r.chance(0.4)) return;
  c.prologue.append = true;
  c.prologue.power_of_two_scales = c.cache.format != ATTUNE_KV_PLAIN && r.chance(0.5);
  if (r.chance(0.6)) {
    RopeSpec& rope = c.prologue.rope;
    rope.style = ATTUNE_ROPE_LINEAR;
    rope.dim = 64, rope.offset = c.head_dim_qk - 64;
    rope.interleaved = r.chance(0.5);
  }
}

}  // namespace

Case random_mla_case(uint64_t seed) {
  Random r("random MLA case", seed);
  Case c;
  c.area = "random";
  c.name = "random/mla/" + std::to_string(seed);
  const Keys keys = r.pick<Keys>({Keys::kPlain, Keys::k656, Keys::k656, Keys::k584});
  draw_rows(r, c, keys);
  const bool sparse = r.chance(0.5);
  c.kv = sparse ? KvSource::kSlots : r.chance(0.75) ? KvSource::kPaged : KvSource::kContiguous;
  if (keys == Keys::kPlain && r.chance(0.25)) c.kv = KvSource::kDense;
  if (c.kv != KvSource::kDense) draw_cache(r, c, keys);
  if (sparse) {
    // The lists of dense keys name those of the shortest sequence.
    for (int64_t& n : c.seqlens_kv) n = c.kv == KvSource::kDense ? std::max<int64_t>(n, 30) : n;
    c.sparse = draw_list(r, c);
    if (c.kv == KvSource::kSlots && r.chance(0.4)) {
      c.extra = draw_list(r, c);
      c.extra.per_head = c.sparse.per_head;
      c.extra_page_size = r.pick<int64_t>({1, 16, 100});
    }
  } else {
    if (c.kv != KvSource::kDense) draw_new_tokens(r, c);
    c.causal = r.chance(0.6);
    if (r.chance(0.2)) c.window_left = r.pick<int64_t>({0, 5, 70, 150});
    if (r.chance(0.1)) c.window_right = r.pick<int64_t>({0, 3});
    if (r.chance(0.15)) {
      c.mask_bits = static_cast<int>(r.integer(1, 2));
      if (r.chance(0.5)) c.mask_start = r.integer(0, 100);
    }
  }
  if (r.chance(0.2)) {
    for (int64_t b = 0; b < c.batch(); ++b) c.finished.push_back(r.chance(0.4) ? 1 : 0);
  }
  c.skip_decode = !c.prologue.any() && r.chance(0.08);  // which no kernel of CUDA takes together
  c.zero_finished = r.chance(0.5);
  if (r.chance(0.3)) c.sinks = r.pick<std::string>({"normal", "mixed"});
  if (r.chance(0.1)) c.softmax_scale = r.uniform(0.01, 0.3);
  if (r.chance(0.2)) c.data = r.pick<std::string>({"spread", "equal", "ones_v"});
  if (c.data == "normal" && r.chance(0.2)) c.plant = r.pick<std::string>({"nan_k", "nan_v"});
  if (r.chance(0.3)) c.out_dtype = r.pick<attune_dtype>({ATTUNE_FLOAT32, ATTUNE_FLOAT32, ATTUNE_FLOAT8_E4M3});
  c.out_scale = c.out_dtype == ATTUNE_FLOAT8_E4M3;
  c.lse = r.chance(0.9);
  c.max_logits = r.chance(0.6);
  c.batch_invariant = r.chance(0.15);
  c.max_seqlens = r.chance(0.2);
  if (c.head_dim_qk == 576 && !c.prologue.any() && r.chance(0.4)) c.q_rope = 64;
  return c;
}

}  // namespace attune::cases
