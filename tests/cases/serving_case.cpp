// SPDX-License-Identifier: Apache-2.0
// Random batches as servers have them: up to hundreds of unlike sequences, of 1, of 2 to 64 and of thousands of tokens.
// What a kernel is compiled for (heads, types, masks, scores) is drawn from few configurations, so that thousands of
// batches need few kernels; lengths, and all else that a kernel reads at run time, are free.
#include <algorithm>

#include "serving_draw.h"

namespace attune::cases {

constexpr double kBesideAttention = 0.2;  // share of batches beside attention
constexpr double kSpread = 0.08;          // share of the batches of attention whose scores lie hundreds apart
constexpr double kBackward = 0.15;        // and of its backward, of the others
constexpr double kLong = 0.03;            // and of long prompts, where the budget has room for them
constexpr int64_t kLongBudget = 16000;

void draw_plain_cache(Random& r, Case& c) {
  CacheSpec& cache = c.cache;
  c.kv = r.chance(0.85) ? KvSource::kPaged : KvSource::kContiguous;
  cache.page_size = r.pick<int64_t>({8, 16, 16, 32, 64, 24, 128, 256});
  if (element_size(c.dtype) == 1 || r.chance(0.4)) {
    cache.dtype = r.pick<attune_dtype>({ATTUNE_FLOAT8_E4M3, ATTUNE_INT8, ATTUNE_FLOAT8_E5M2});
    cache.scales = draw_scales(r, cache.dtype);
  } else if (r.chance(0.15)) {
    cache.dtype = r.pick<attune_dtype>({ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT32});
  }
  cache.layout = r.pick<attune_kv_layout>({ATTUNE_KV_NHD, ATTUNE_KV_NHD, ATTUNE_KV_HND, ATTUNE_KV_XPACKED});
  if (c.head_dim_qk % (16 / element_size(c.cache_dtype())) != 0 && cache.layout == ATTUNE_KV_XPACKED)
    cache.layout = ATTUNE_KV_NHD;
  cache.separate_v_table = c.kv == KvSource::kPaged && r.chance(0.15);
  cache.page_padding = r.chance(0.2);
}

namespace {

void draw_new_tokens(Random& r, Case& c) {
  c.new_tokens = r.chance(0.5);
  if (!c.new_tokens) return;
  c.prologue.append = r.chance(0.6);
  if (r.chance(0.2)) c.window_left = r.pick<int64_t>({15, 127});
  if (!r.chance(0.5)) return;
  c.prologue.rope.style = ATTUNE_ROPE_LINEAR;
  c.prologue.rope.dim = std::min<int64_t>(c.head_dim_qk, 64);
  c.prologue.rope.max_position = 1 << 14;
}

void draw_scores(Random& r, Case& c) {
  if (r.chance(0.08)) c.softmax_scale = r.uniform(-0.3, 0.3);
  if (r.chance(0.15)) c.softcap = 30;
  if (r.chance(0.2)) c.sinks = "mixed";
  if (r.chance(0.15)) c.alibi = 1;
  if (r.chance(0.2)) c.window_left = r.pick<int64_t>({15, 127, 500});
}

// What the kernels of a configuration are compiled for.
Kind draw_configuration(Random& r, Case& c, uint64_t configuration) {
  const Kind kind =
      r.pick<Kind>({Kind::kDecode, Kind::kDecode, Kind::kChunk, Kind::kPrefill, Kind::kPrefill, Kind::kShortPrompts,
                    Kind::kMixed, Kind::kCodes, Kind::kCodes, Kind::kFloats, Kind::kMla, Kind::kMla, Kind::kMlaSparse,
                    Kind::kAny, Kind::kAny, Kind::kAny, Kind::kAny, Kind::kIndexer});
  if (kind == Kind::kAny) {
    c = r.chance(0.25) ? random_mla_case(configuration) : random_case(configuration);
    return kind;
  }
  if (kind == Kind::kIndexer) {
    c = random_indexer_case(configuration);
    return kind;
  }
  c.causal = r.chance(0.8);
  c.dtype = r.pick<attune_dtype>({ATTUNE_BFLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT16});
  c.num_heads_kv = r.pick<int64_t>({1, 1, 2, 8});
  c.num_heads_q = c.num_heads_kv * r.pick<int64_t>({1, 4, 8, 16});
  c.head_dim_qk = c.head_dim_v = r.pick<int64_t>({128, 128, 128, 64, 40, 256});
  c.lse = r.chance(0.5);
  c.max_logits = r.chance(0.2);
  c.batch_invariant = r.chance(0.15);
  switch (kind) {
    case Kind::kDecode:
    case Kind::kChunk:
    case Kind::kMixed:
      if (kind == Kind::kDecode && r.chance(0.12)) {
        c.dtype = r.pick<attune_dtype>({ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8});
        c.out_dtype = ATTUNE_BFLOAT16;
        c.prologue.qkv_scale = true;
      }
      draw_plain_cache(r, c);
      draw_new_tokens(r, c);
      draw_scores(r, c);
      if (kind == Kind::kMixed) c.batch_invariant = false;
      if (kind == Kind::kDecode && r.chance(0.15)) c.beam_width = r.pick<int64_t>({2, 3, 4});
      break;
    case Kind::kPrefill:
      if (r.chance(0.25)) c.head_dim_qk = 192, c.head_dim_v = 128;
      c.strides = r.pick<StrideMode>(
          {StrideMode::kDense, StrideMode::kDense, StrideMode::kPacked, StrideMode::kOdd, StrideMode::kSpread});
      if (c.head_dim_qk != c.head_dim_v && c.strides == StrideMode::kPacked) c.strides = StrideMode::kDense;
      if (r.chance(0.1)) c.head_dim_qk = c.head_dim_v = 100;
      draw_scores(r, c);
      break;
    case Kind::kShortPrompts:
      c.batch_invariant = false;
      break;
    case Kind::kCodes:
      c.dtype = ATTUNE_FLOAT8_E4M3;
      c.out_dtype = ATTUNE_BFLOAT16;
      c.prologue.qkv_scale = true;
      c.head_dim_qk = c.head_dim_v = r.pick<int64_t>({64, 128});
      break;
    case Kind::kFloats:
      c.dtype = ATTUNE_FLOAT32;
      c.head_dim_qk = c.head_dim_v = r.pick<int64_t>({64, 128, 128, 100, 256});
      if (r.chance(0.5)) draw_plain_cache(r, c), draw_new_tokens(r, c);
      draw_scores(r, c);
      break;
    case Kind::kMla:
    case Kind::kMlaSparse:
      c.dtype = ATTUNE_BFLOAT16;
      c.head_dim_qk = 576, c.head_dim_v = 512;
      c.shared_kv = true;
      c.num_heads_kv = 1;
      c.num_heads_q = r.pick<int64_t>({8, 12, 16, 16, 32, 64, 128});
      c.kv = kind == Kind::kMla ? KvSource::kPaged : KvSource::kSlots;
      c.cache.page_size = r.pick<int64_t>({16, 24, 64, 64});
      if (r.chance(0.5)) {
        c.cache.format = r.chance(0.3) ? ATTUNE_KV_MLA_584 : ATTUNE_KV_MLA_656;
        c.cache.layout = ATTUNE_KV_BYTES;
        if (c.cache.format == ATTUNE_KV_MLA_584) c.head_dim_qk = 512;
      }
      if (kind == Kind::kMla) {
        c.new_tokens = r.chance(0.3);
        c.prologue.append = c.new_tokens && r.chance(0.7);
      } else {
        c.sparse.topk = r.pick<int64_t>({64, 200, 512, 2048});
        c.sparse.slots = 2000;
        c.sparse.lengths = r.pick<Lengths>({Lengths::kNone, Lengths::kToken});
        if (r.chance(0.3)) c.extra = c.sparse, c.extra.topk = r.pick<int64_t>({64, 512, 2048});
        c.causal = false;
      }
      break;
    case Kind::kAny:
    case Kind::kIndexer:
      break;
  }
  return kind;
}

}  // namespace

int64_t draw_length(Random& r, int64_t most) {
  const double where = r.uniform();
  if (where < 0.25) return 1;
  if (where < 0.75) return r.integer(2, 64);
  if (where < 0.95) return r.integer(1, std::max<int64_t>(1, most / 8));
  return r.integer(1, most);
}

void draw_lengths(Random& r, Case& c, Kind kind, int64_t budget) {
  const bool cached = c.kv != KvSource::kDense;
  const bool short_prompts = kind == Kind::kShortPrompts;
  // A sequence of more keys than clusters take, in more than 32 splits; more sequences than a schedule has threads.
  const bool one_long = cached && budget >= kLongBudget && c.beam_width <= 1 && r.chance(0.08);
  const int64_t most_sequences = one_long        ? r.pick<int64_t>({1, 3})
                                 : short_prompts ? r.integer(1, 16)
                                                 : r.pick<int64_t>({1, 3, 20, 100, 400, 1100});
  const bool many = most_sequences > 1000;
  const int64_t longest = short_prompts ? 128 : r.pick<int64_t>({70, 600, 3000});
  if (!short_prompts) budget = std::max<int64_t>(budget / std::max<int64_t>(1, c.num_heads_kv / 2), 200);
  // Equal sequences whose lengths the host knows have a list of their own.
  const bool alike = !cached && !short_prompts && c.strides != StrideMode::kPacked && r.chance(0.2);
  const int64_t rows_of_each = budget / (c.num_heads_q / c.num_heads_kv + 1) / most_sequences;
  const int64_t same = alike ? std::min(draw_length(r, longest), std::max<int64_t>(1, rows_of_each)) : 0;
  const bool decode = kind == Kind::kDecode || kind == Kind::kMla || kind == Kind::kMlaSparse;
  const bool beams = c.beam_width > 1;
  const int64_t tokens = !decode ? 0 : beams ? 1 : many ? 1 : r.pick<int64_t>({1, 1, 1, 2, 4});
  // A row costs its heads, beside a key that costs one.
  const int64_t row_cost = c.num_heads_q / c.num_heads_kv + 1;
  int64_t cost = 0;
  for (int64_t b = 0; b < most_sequences && cost < budget; ++b) {
    int64_t n_q = decode ? tokens : draw_length(r, longest);
    if (kind == Kind::kMixed && r.chance(0.7)) n_q = 1;
    if (kind == Kind::kChunk) n_q = std::min<int64_t>(n_q, 300);
    if (alike) n_q = same;
    if (many || one_long) n_q = std::min<int64_t>(n_q, many ? 1 : 40);
    int64_t n_kv = cached ? draw_length(r, longest) : n_q;
    if (many) n_kv = std::min<int64_t>(n_kv, 12);
    if (kind == Kind::kMlaSparse) n_kv = 0;
    n_q = std::min(n_q, std::max<int64_t>(1, budget / row_cost));
    n_kv = std::min(n_kv, budget);
    if (one_long && b == 0 && kind != Kind::kMlaSparse)
      n_kv = r.integer(10000, 48000) / std::max<int64_t>(1, c.num_heads_kv * c.head_dim_qk / 256);
    if (cached && !c.new_tokens && kind != Kind::kMlaSparse) n_kv = std::max(n_kv, n_q);
    // The beams of a request have as many keys and one prompt.
    if (const bool first = !beams || b % c.beam_width == 0; beams) {
      if (!first) n_kv = c.seqlens_kv.back();
      c.beam_prompt.push_back(first ? r.integer(0, n_kv) : c.beam_prompt.back());
    }
    c.seqlens_q.push_back(n_q);
    c.seqlens_kv.push_back(cached ? n_kv : n_q);
    cost += n_q * row_cost + n_kv;
  }
  while (beams && c.batch() % c.beam_width != 0) {
    c.seqlens_q.push_back(1);
    c.seqlens_kv.push_back(c.seqlens_kv.back());
    c.beam_prompt.push_back(c.beam_prompt.back());
  }
  c.queries = alike || (decode && r.chance(0.5)) ? QueryShape::kFixed : QueryShape::kRagged;
  c.max_seqlens = short_prompts || r.chance(0.3);
  // A ring that holds the window, of any depth from there.
  if (kind == Kind::kDecode && c.new_tokens && c.window_left > 0 && c.cache.format == ATTUNE_KV_PLAIN && tokens <= 8)
    c.cache.ring_capacity = r.chance(0.5) ? 0 : r.integer(c.window_left, c.window_left + 200);
  if (r.chance(0.1)) {
    for (int64_t b = 0; b < c.batch(); ++b) c.finished.push_back(r.chance(0.2) ? 1 : 0);
    c.zero_finished = r.chance(0.5);
  }
}

void draw_any_lengths(Random& r, Case& c, int64_t budget) {
  const bool decode = c.max_seqlen_q() <= 1, fixed = c.queries == QueryShape::kFixed;
  // Tables over rows and keys: their size is a product.
  const bool tables = c.bias > 0 || c.mask_bits > 0;
  const int64_t longest = std::min<int64_t>(r.pick<int64_t>({70, 600, 3000}), tables ? 300 : 3000);
  const int64_t any_sequences = std::min<int64_t>(r.pick<int64_t>({1, 3, 20, 100, 400}), tables ? 12 : 400);
  const bool light = c.num_heads_q * c.head_dim_qk <= 2048;
  const bool long_lists = c.indexer.topk > 0 && light && budget >= kLongBudget / 4 && r.chance(0.3);
  const bool many_rows = c.indexer.topk > 0 && light && !long_lists && r.chance(0.3);
  const int64_t most_sequences = long_lists ? std::min<int64_t>(any_sequences, 4) : any_sequences;
  const int64_t row_cost = std::max<int64_t>(c.num_heads_q * c.head_dim_qk / 256, 4);
  const int64_t most_rows = c.cache.ring_capacity > 0 ? 8 : std::max<int64_t>(1, budget / row_cost);
  // Dense rows and contiguous slots lie as long as the longest sequence.
  const bool square = c.kv == KvSource::kContiguous || (c.kv == KvSource::kDense && fixed);
  const int64_t most_keys = square ? std::max<int64_t>(30, 4 * budget / most_sequences) : budget;
  const int64_t fixed_q = decode ? 1
                                 : std::min({draw_length(r, longest), most_rows,
                                             int64_t{many_rows            ? 64
                                                     : c.indexer.topk > 0 ? 8
                                                                          : 64}});
  const bool had_ranges = !c.ranges.empty(), had_finished = !c.finished.empty();
  c.seqlens_q.clear(), c.seqlens_kv.clear(), c.ranges.clear(), c.finished.clear();
  int64_t cost = 0;
  for (int64_t b = 0; b < most_sequences && cost < budget; ++b) {
    int64_t n_q = fixed ? fixed_q : decode ? 1 : std::min(draw_length(r, longest), most_rows);
    int64_t n_kv = r.chance(0.05) ? 0 : std::min(draw_length(r, longest), most_keys);
    if (c.bias > 0 && !c.new_tokens) n_kv = std::max(n_kv, n_q);
    // The lists of dense keys name those of the shortest sequence.
    if (c.sparse.topk > 0 && c.kv == KvSource::kDense) n_kv = std::max<int64_t>(n_kv, 30);
    if (c.indexer.topk > 0) {
      // The oracle scores every pair of a row and a key.
      n_q = std::min<int64_t>(n_q, many_rows ? 64 : 8);
      if (many_rows && !fixed && !decode) n_q = r.integer(33, 64);
      if (many_rows && b == 0 && !square) n_kv = r.integer(4000, 10000);
      if (long_lists && b == 0)
        n_kv = r.integer(16000, c.head_dim_qk <= 16 ? 150000 : c.head_dim_qk <= 64 ? 80000 : 40000);
      cost += n_q * n_kv * c.num_heads_q * c.head_dim_qk / 8192;
    }
    c.seqlens_q.push_back(n_q);
    c.seqlens_kv.push_back(n_kv);
    cost += n_q * row_cost + n_kv;
    if (const int64_t first = r.integer(0, 300); had_ranges) c.ranges.push_back({first, first + r.integer(0, 300)});
    if (had_finished) c.finished.push_back(r.chance(0.3) ? 1 : 0);
  }
}

Case serving_case(uint64_t seed, uint64_t index, int configurations, int64_t budget) {
  const auto named = [&](Case c) {
    c.area = "stress";
    c.name = "stress/" + std::to_string(seed) + ":" + std::to_string(index);
    return c;
  };
  Random r("serving case " + std::to_string(seed), index);
  // Another seed has other configurations, too: with those of one seed alone most variants of the kernels never ran.
  const auto draw_configuration_of = [seed](Random& of, int count) {
    return seed * static_cast<uint64_t>(count) + static_cast<uint64_t>(of.integer(0, count - 1));
  };
  if (Random op("serving operation " + std::to_string(seed), index); op.chance(kBesideAttention)) {
    const uint64_t configuration = draw_configuration_of(op, configurations);
    return named(serving_op_case(op, configuration, op.pick<int64_t>({budget / 20, budget / 20, budget / 4})));
  }
  if (Random op("serving backward " + std::to_string(seed), index); op.chance(kBackward)) {
    const uint64_t configuration = draw_configuration_of(op, configurations);
    return named(serving_backward_case(op, configuration, op.pick<int64_t>({budget / 20, budget / 4, budget})));
  }
  if (Random op("serving long " + std::to_string(seed), index); budget >= kLongBudget && op.chance(kLong))
    return named(serving_long_case(op, draw_configuration_of(op, std::max(configurations / 8, 1))));
  const uint64_t configuration = draw_configuration_of(r, configurations);
  Case c;
  Random of_configuration("serving configuration", configuration);
  const Kind kind = draw_configuration(of_configuration, c, configuration);
  const auto of_case =
      kind == Kind::kShortPrompts ? budget : r.pick<int64_t>({budget / 20, budget / 20, budget / 4, budget});
  if (kind == Kind::kAny || kind == Kind::kIndexer) {
    draw_any_lengths(r, c, of_case);
  } else {
    draw_lengths(r, c, kind, of_case);
  }
  // Scores that rise from key tile to key tile by more than a P in fp32 holds. Not with latents: cuda_mla's partial
  // outputs are fp16 beside the largest of 64 channels, which bounds of one channel do not know.
  Random data("serving data " + std::to_string(seed), index);
  if (kind != Kind::kIndexer && c.head_dim_v <= 256 && c.data == "normal" && data.chance(kSpread)) c.data = "spread";
  const bool latent = kind == Kind::kMla || kind == Kind::kMlaSparse;
  if (latent && c.head_dim_qk == 576 && !c.prologue.any() && data.chance(0.5))
    c.q_rope = 64;  // the same kernels read them
  return named(std::move(c));
}

}  // namespace attune::cases
