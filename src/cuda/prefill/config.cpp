// SPDX-License-Identifier: Apache-2.0
#include "cuda/prefill/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/dtype.h"
#include "core/integers.h"
#include "cuda/attention/params.h"
#include "cuda/attention/prologue.h"
#include "cuda/attention/tensor_maps.h"
#include "cuda/attention/work_tiles.h"
#include "cuda/prefill/cache_copies.h"

namespace attune::cuda::prefill {
namespace {

using attention::kAlignment;

constexpr int kMaxShared = 232448;
// Key tiles of a split, at least; and of the longest row block of a batch that stays whole: eight of 128 keys take
// 19.5 us on an H200, in two splits that are stored and combined 22.4.
constexpr int kFewestTiles = 4, kWholeTiles = 8;
constexpr int kMostRows = 192;  // of a block

using kernels::kScaleFirst;

int score_kinds(const Problem& p) {
  // exp2 applies the scale, and ALiBi's slopes are divided by it. A scale that is not positive, or tiny beside slopes,
  // is applied to the scores first.
  return attention::score_kinds(p) | (p.scale > (p.alibi ? 0x1p-64f : 0.0f) ? 0 : kScaleFirst);
}

// tanh(y) = y (t0 + t1 y^2 + ..) for |y| <= range, least squares with weights that even out the error, at most 8.1e-7.
// Outside of the range it falls faster than tanh: the row's largest score must be `gap` powers of two above such
// scores. Then P is wrong by at most 2^-26 of the largest P.
struct Tanh3 {
  static constexpr double kRange = 0.375, kGap = 16.5;
  static constexpr std::array<double, 3> kTerms = {0.9999854, -0.33248844, 0.12098797};
};
struct Tanh5 {
  static constexpr double kRange = 0.85, kGap = 24;
  static constexpr std::array<double, 5> kTerms = {0.99999181, -0.333095, 0.13136762, -0.0471443, 0.01063774};
};
struct Tanh7 {
  static constexpr double kRange = 1.33, kGap = 26;
  static constexpr std::array<double, 7> kTerms = {0.99999328,  -0.33317936,   0.13230107,   -0.050836564,
                                                   0.016732740, -0.0038453779, 0.00042812011};
};

// The largest error of the polynomials, and the largest change of a score by it that is accepted.
constexpr double kTanhError = 8.1e-7, kScoreError = 8.1e-5;

// For a softcap of level / log2 e and y = product * of_product. A polynomial is used only if its terms are accurate:
// down to 1e-40 they are within 7e-6 of themselves, and the last ones are small. Not for softcaps above 100, where
// tanh's error would exceed kScoreError.
template <class Tanh, int kTerms>
void fill_polynomial(double level, double of_product, kernels::CapPolynomial<kTerms>& k) {
  const double edge = std::tanh(Tanh::kRange);
  bool exact = level * kTanhError <= kScoreError * std::numbers::log2e;
  double power = level * of_product;
  for (size_t i = 0; i < Tanh::kTerms.size(); ++i, power *= of_product * of_product) {
    k.terms[i] = static_cast<float>(Tanh::kTerms[i] * power);
    exact = exact && std::isfinite(k.terms[i]) && std::abs(k.terms[i]) >= 1e-40f;
  }
  const bool sinks = Tanh::kGap / level < 2 * edge;
  k.low = sinks ? static_cast<float>(std::atanh(Tanh::kGap / level - edge) / of_product)
                : std::numeric_limits<float>::infinity();
  k.high = exact ? static_cast<float>(Tanh::kRange / of_product) : -std::numeric_limits<float>::infinity();
}

// Two terms, where all products of a row are in range. The range is as large as kScoreError allows.
void fill_small(double softcap, double level, double of_product, kernels::CapPolynomial<2>& k) {
  const double range = std::pow(120 * kScoreError / softcap, 0.2), square = range * range;
  // y - y^3 / 3 + 2 y^5 / 15 - 17 y^7 / 315 without its components of Chebyshev's T5 and T7.
  const double terms[] = {1 - square * square / 24 + 17 * square * square * square / 720,
                          -1.0 / 3 + square / 6 - 17 * square * square / 240};
  k.terms[0] = static_cast<float>(terms[0] * level * of_product);
  k.terms[1] = static_cast<float>(terms[1] * level * of_product * of_product * of_product);
  const bool exact = std::isfinite(k.terms[0]) && k.terms[0] >= 1e-40f && k.terms[1] <= -1e-40f;
  k.high = exact && range <= Tanh3::kRange ? static_cast<float>(range / of_product) : 0.0f;
  k.low = -k.high;
}

void fill_cap(double scale, double softcap, kernels::WorkTileParams& k) {
  const double of_product = scale / softcap, level = softcap * std::numbers::log2e;
  k.cap_unit = static_cast<float>(of_product);
  fill_small(softcap, level, of_product, k.cap_small);
  fill_polynomial<Tanh3>(level, of_product, k.cap_short);
  fill_polynomial<Tanh5>(level, of_product, k.cap_long);
  fill_polynomial<Tanh7>(level, of_product, k.cap_wide);
}

// Whether the short polynomial needs a row maximum beyond 2^4, which many rows never have.
bool is_low_cap(double softcap) { return Tanh3::kGap - softcap * std::numbers::log2e * std::tanh(Tanh3::kRange) > 4; }

// Whether threads may gather a cache that the TMA cannot copy.
bool may_gather(const Problem& p) { return p.cache && p.q.element_size == 2 && p.cache.k.dtype == p.q.dtype; }
bool gathers(const Problem& p) {
  return may_gather(p) && !refusal_of_cache(p.cache).empty() && refusal_of_cache(p.cache, kFewestGathered).empty();
}

}  // namespace

size_t Config::shared_bytes() const {
  return static_cast<size_t>(kernels::prefill_shared_bytes(rows, keys, stages, raw_stages, token_scales, head_dim_qk,
                                                           head_dim_v, static_cast<int>(dtype_size(dtype)),
                                                           query_stages, cluster));
}

KernelSpec Config::main_kernel() const {
  const char* const variant = fp32() ? "_fp32" : fp8() ? "_fp8" : "";
  KernelSpec spec{
      cat("prefill/prefill", variant, ".cu"),
      cat("attune_prefill", variant),
      {define("ATTUNE_HEAD_DIM_QK", head_dim_qk), define("ATTUNE_HEAD_DIM_V", head_dim_v), define("ATTUNE_TYPE", dtype),
       define("ATTUNE_OUT_TYPE", out_dtype), define("ATTUNE_SCORE", score), define("ATTUNE_MASK", mask),
       define("ATTUNE_CACHED", cached ? 1 : 0), define("ATTUNE_DENSE", dense ? 1 : 0), define("ATTUNE_KEYS", keys),
       define("ATTUNE_STAGES", stages), define("ATTUNE_CACHE_TYPE", cache_dtype), define("ATTUNE_ROWS", rows),
       define("ATTUNE_RAW_STAGES", raw_stages), define("ATTUNE_TOKEN_SCALES", token_scales)},
      shared_bytes()};
  if (x_packed) spec.defines.push_back(define("ATTUNE_XPACKED", 1));
  if (gather > 0) spec.defines.push_back(define("ATTUNE_GATHER", gather));
  if (low_cap) spec.defines.push_back(define("ATTUNE_LOW_CAP", 1));
  if (query_stages > 1) spec.defines.push_back(define("ATTUNE_QUERY_STAGES", query_stages));
  if (cluster > 1) spec.defines.push_back(define("ATTUNE_CLUSTER", cluster));
  if (row_pairs) spec.defines.push_back(define("ATTUNE_ROW_PAIRS", 1));
  return spec;
}

KernelSpec Config::schedule_kernel() const { return attention::schedule_kernel(*this, false, false); }

namespace {

// What a kernel refuses whose threads load the rows. Rows may lie anywhere, so only dtypes count.
std::string dtype_refusal(const Problem& p) {
  if ((p.dense_kv || p.new_tokens) && (p.k.dtype != p.q.dtype || p.v.dtype != p.q.dtype))
    return "q, k and v of different dtypes";
  if (p.cache && p.cache.k.dtype != p.cache.v.dtype) return "K and V of different dtypes";
  return "";
}

std::string tma_refusal(const Problem& p) {
  if (p.q.element_size == 1 && (p.head_dim_qk % 16 != 0 || p.head_dim_v % 16 != 0))
    return "head dims that are no multiples of 16 with queries of 8 bits";
  const bool copied = attention::has_prologue(p) || attention::copies_rows(p);  // q, k and v
  if (std::string why = dtype_refusal(p); !why.empty()) return why;
  if (p.cache && p.cache.k.element_size > 1 && p.cache.k.dtype != p.q.dtype)
    return "q and a cache of 16 or 32 bits of different dtypes";
  if (p.cache && p.cache.k.element_size == 1 && (p.head_dim_qk % 16 != 0 || p.head_dim_v % 16 != 0))
    return "head dims that are no multiples of 16 with a cache of 8 bits";
  if (p.cache && !gathers(p)) {
    std::string why = refusal_of_cache(p.cache);
    if (!why.empty() && may_gather(p)) why = refusal_of_cache(p.cache, kFewestGathered);
    if (!why.empty()) return why;
  }
  return attention::refusal_of(attention::find_misaligned(p, copied, true));
}

std::string refusal_of(const Problem& p, std::string (*of_rows)(const Problem&)) {
  if (p.total_q * p.heads_q >= int64_t{1} << 31) return "2^31 or more rows of queries and heads";
  if (std::string why = attention::prologue_refusal(p); !why.empty()) return why;
  if (std::string why = of_rows(p); !why.empty()) return why;
  return attention::table_refusal(p);
}

}  // namespace

std::string refusal(const Problem& p) {
  return p.q.dtype == ATTUNE_FLOAT32 ? refusal_as_fp32(p) : refusal_of(p, tma_refusal);
}
std::string refusal_as_fp32(const Problem& p) { return refusal_of(p, dtype_refusal); }

namespace {

// Row blocks of a sequence of mean length.
int64_t mean_blocks(const Problem& p, int rows) {
  const int heads = attention::choose_heads_of_tile(p.group, rows);
  return ceil_div(ceil_div(p.total_q, std::max<int64_t>(p.batch, 1)), rows / heads) * (p.group / heads);
}

// With at most 64 channels a tile's softmax takes longer than its GEMMs, and three consumer groups hide its latency
// better than two. A block of 192 rows takes about 5/4 of the time of one of 128, so prompts must fill it. With
// batch_invariant the choice must not depend on the other sequences.
bool takes_three_groups(const Problem& p, const Config& c) {
  const bool boxes = !c.x_packed && c.gather == 0 && c.cache_dtype == c.dtype;
  if (!boxes || c.score != 0 || c.mask != 0 || std::max(p.head_dim_qk, p.head_dim_v) > 64) return false;
  return p.batch_invariant || 5 * mean_blocks(p, kMostRows) <= 4 * mean_blocks(p, c.rows);
}

void choose_tiles(const Problem& p, Config& c) {
  if (takes_three_groups(p, c)) {
    c.rows = kMostRows, c.keys = c.cached ? 96 : 128, c.stages = 4;
    return;
  }
  // Registers of a thread: head_dim_v / 2 for O, keys / 2 for S, keys / 4 for P; masks and tables take some too.
  const int64_t widest = std::max(p.head_dim_qk, p.head_dim_v);
  c.keys = widest > 192 || p.head_dim_v > 128 ? 64 : 128;
  if ((c.mask != 0 || (c.score & (use::kTables | kScaleFirst)) != 0) && widest > 64) c.keys /= 2;
  const bool quantized = c.cache_dtype != c.dtype;
  if ((quantized || c.gather > 0) && widest > 192) c.keys = 32;
  // Per-token scales and fp16 queries: each P is two bf16 numbers.
  if (quantized && c.token_scales != 0 && c.dtype == ATTUNE_FLOAT16) c.keys = std::min(c.keys, 64);
  // An x-packed V takes registers, and so do the warps that gather.
  if (c.gather > 0 && c.x_packed && c.score != 0 && widest > 64) c.keys = std::min(c.keys, 64);
  // Such kernels have two mainloops, for cached and for dense V, which take more registers.
  if (c.x_packed && c.dense && p.head_dim_v > 224) c.keys = 32;
  c.stages = 4, c.raw_stages = quantized ? 4 : 0;
  while (c.stages > 2 && static_cast<int>(c.shared_bytes()) > kMaxShared) --c.stages;
  while (c.raw_stages > 2 && static_cast<int>(c.shared_bytes()) > kMaxShared) --c.raw_stages;
  while (c.keys > 32 && static_cast<int>(c.shared_bytes()) > kMaxShared) c.keys /= 2;
  // The first QK GEMM of the next work tile overlaps this one's epilogue. It needs a second stage of Q, and registers
  // for its S.
  const bool has_registers =
      !c.cached && p.head_dim_v <= 128 && (c.score == 0 || c.score == use::kAlibi) && c.mask == 0;
  if (!has_registers || c.stages < 3) return;
  c.query_stages = 2;
  if (static_cast<int>(c.shared_bytes()) > kMaxShared) c.query_stages = 1;
}

// Registers of a thread: keys / 2 for S, 3 keys / 4 for P in three bf16 parts. GEMMs of fewer than 64 keys would be
// bound by shared memory.
void choose_fp32_tiles(Config& c) {
  c.token_scales = 0;                                             // all scales are applied before numbers are split
  c.rows = c.head_dim_qk > 128 || c.head_dim_v > 128 ? 64 : 128;  // q, K and V take three times the shared memory
  c.keys = 64, c.stages = 4;
  while (c.stages > 1 && static_cast<int>(c.shared_bytes()) > kMaxShared) --c.stages;
  if (static_cast<int>(c.shared_bytes()) > kMaxShared) c.keys = 32;
}

// fp8: V is transposed by lines of 128 keys. Stages are counted in powers of two.
void choose_fp8_tiles(Config& c) {
  c.score = 0;  // only the device knows the scales of q and k, and so the sign
  c.keys = 128, c.stages = 4, c.raw_stages = 2;
  if (static_cast<int>(c.shared_bytes()) > kMaxShared) c.stages = 2;
}

// Whether two blocks can copy keys together. L2 is read half as often. With batch_invariant the choice must not depend
// on the other sequences.
bool may_pair(const Problem& p, const Config& c, int num_sms) {
  const bool boxes = !c.x_packed && c.gather == 0 && c.cache_dtype == c.dtype && dtype_size(c.dtype) == 2;
  // Pairs need a producer warp each for K and V: a single one has no registers left.
  const bool two_warps = (c.score == 0 || !c.cached) && c.head_dim_v <= 128;
  // With few channels the softmax takes longer than copying dense keys. Keys of a cache come in small boxes, and
  // slower.
  const bool wide = c.cached || (c.head_dim_qk > 64 && c.head_dim_v > 64);
  return boxes && two_warps && wide && num_sms % 2 == 0 && c.max_decode_q == 0 && !p.batch_invariant;
}

// Each block of a pair has half of the query heads of a KV head, and the same tokens. Only where prompts fill such
// blocks, in the mean.
bool pairs_by_heads(const Problem& p, const Config& c) {
  return p.group % 2 == 0 && p.total_q * attention::choose_heads_of_tile(p.group / 2, c.rows) >= c.rows * p.batch;
}

// The blocks have neighbouring tokens. At an edge of causality or of a window one of them sees nothing of a tile: that
// costs as much as the pair gains over dense keys, and less over pages, where rows see many keys in the mean. The last
// pair of a prompt is half empty in every second case, and takes as long: prompts must be long. Nothing is split along
// the keys, so there must be several rounds of work, and no pair may take longer than all others would together.
bool pairs_by_rows(const Problem& p, const Config& c, int num_sms) {
  constexpr int64_t kLong = 4096, kBlocks = 32, kRounds = 4;
  const int64_t tokens = 2 * c.tokens_of_tile, mean = p.total_q / std::max<int64_t>(p.batch, 1);
  const int64_t keys = p.window_left >= 0 ? std::min(mean, p.window_left) : mean;
  const bool edges = p.causal || p.window_left >= 0 || p.window_right >= 0;
  if (p.group % 2 == 0 || (c.score & use::kTables) != 0 || c.rows > 128) return false;  // three groups would spill
  if (mean < kBlocks * c.tokens_of_tile || (edges && (!c.cached || keys < kLong))) return false;
  const int64_t pairs = p.total_q / tokens * (p.heads_q / c.heads_of_tile), at_once = num_sms / 2;
  // Keys that a pair sees: at most; and at least in the mean, where no prompt is longer than its keys.
  const int64_t most =
      p.window_left >= 0 && p.causal ? std::min(p.max_seqlen_kv, p.window_left + tokens) : p.max_seqlen_kv;
  const int64_t least = p.causal ? keys / 2 : keys;
  return pairs >= kRounds * at_once && most * at_once <= least * pairs;
}

}  // namespace

Config choose_config(const Problem& p, int num_sms, int max_decode_q) {
  Config c;
  c.max_decode_q = max_decode_q;
  c.head_dim_qk = static_cast<int>(p.head_dim_qk);
  c.head_dim_v = static_cast<int>(p.head_dim_v);
  c.dtype = c.cache_dtype = p.q.dtype;
  if (p.cache) c.cache_dtype = p.cache.k.dtype;
  if (p.cache) c.token_scales = p.cache.token_scales();
  c.out_dtype = p.out.dtype;
  c.score = score_kinds(p);
  c.low_cap = c.score == use::kSoftcap && is_low_cap(p.softcap);
  c.mask = attention::mask_kinds(p);
  c.t5 = attention::t5_buckets(p);
  c.cached = static_cast<bool>(p.cache);
  c.dense = p.dense_kv || p.new_tokens;
  c.x_packed = p.cache.x_packed && !c.fp32();
  c.gather = gathers(p) ? bytes_to_gather(p.cache) : 0;
  if (c.fp32()) {
    choose_fp32_tiles(c);
  } else if (c.fp8()) {
    choose_fp8_tiles(c);
  } else {
    choose_tiles(p, c);
  }
  const bool may = may_pair(p, c, num_sms);
  if (may && pairs_by_heads(p, c)) c.cluster = 2;
  c.heads_of_tile = attention::choose_heads_of_tile(p.group / c.cluster, c.rows);
  c.tokens_of_tile = c.rows / c.heads_of_tile;
  c.fewest_tiles = kFewestTiles;
  c.whole_tiles = c.fp32() ? kFewestTiles : kWholeTiles;  // fp32 tiles take longer
  c.partials = {c.rows, 2, round_up(c.head_dim_v, 32), false};
  attention::choose_grid(p, num_sms, c);
  if (may && pairs_by_rows(p, c, num_sms)) pair_rows(c, num_sms);
  return c;
}

void pair_rows(Config& c, int num_blocks) {
  c.row_pairs = true, c.cluster = 2;
  c.splits = false, c.blocks = num_blocks;
}

void check_alignment(const Problem& p, bool gathered) {
  if (p.q.dtype == ATTUNE_FLOAT32) return;
  attention::check_aligned(attention::find_misaligned(p, false, gathered), "cuda_prefill");
}

void check_run(const Problem& p, const Config& c) {
  check_alignment(p, c.gather > 0);
  const bool fp32 = p.q.dtype == ATTUNE_FLOAT32;
  const char* const moved = fp32 ? nullptr : attention::row_to_copy(p);
  require(moved == nullptr, "rows of ", moved,
          " do not lie at multiples of 16 bytes, as they did when the plan was made; plan with such rows");
  std::string why = p.cache && !fp32 && c.gather == 0 ? refusal_of_cache(p.cache) : "";
  if (why.empty()) why = refusal(p);
  if (why.empty() && c.gather > bytes_to_gather(p.cache))
    why = cat("a cache whose rows do not lie at multiples of ", c.gather, " bytes");
  attention::require_still_taken(c.name(), why);
  require(c.fp8() || (score_kinds(p) & kScaleFirst & ~c.score) == 0, "softmax_scale is ", p.scale,
          "; the plan was made for one that is positive");
  attention::check_ranges(p, c.mask);
}

namespace {

// Row blocks of each sequence, if all have the same number and none is split, as far as the host can know; else 0. The
// schedule splits by the number of all tiles, of which the host has a lower bound.
int blocks_alike(const Problem& p, const Config& c) {
  const bool plain = !p.cu_q && !p.cu_kv && !p.seqused && !c.cached && p.finished == nullptr && p.num_ranges == 0 &&
                     !p.skip_decode && p.window_left < 0 && p.window_right < 0 && c.max_decode_q == 0;
  const int64_t tokens = c.tokens_of_tile * (c.row_pairs ? 2 : 1);
  const int64_t ahead = p.fixed_kv - p.fixed_q, blocks = ceil_div(p.fixed_q, tokens);
  const int64_t most = ceil_div(p.fixed_kv, c.keys);  // tiles of a block
  if (!plain || ahead < 0 || blocks * p.batch > c.max_work_tiles) return 0;
  const int64_t keys = p.causal ? blocks * ahead + (blocks - 1) * blocks / 2 * tokens : blocks * p.fixed_kv;
  const int64_t tiles = keys / c.keys * p.batch * (p.heads_q / c.heads_of_tile);
  const bool splits = c.splits && most > c.whole_tiles && tiles <= (most - 1) * c.blocks;
  return splits ? 0 : static_cast<int>(blocks);
}

}  // namespace

kernels::WorkTileParams to_params(const Problem& p, const Config& c, void* workspace) {
  kernels::WorkTileParams k = attention::to_params(p, c.t5, c, workspace);
  if (c.dense) k.new_k = attention::dense_rows(p.k), k.new_v = attention::dense_rows(p.v);
  k.prologue.qkv_scale = p.prologue.qkv_scale;
  k.prologue.qkv_scale_stride = p.prologue.qkv_scale_stride;
  k.inverse_heads = 65535u / static_cast<unsigned>(c.heads_of_tile) + 1;
  k.max_decode_q = c.max_decode_q;
  if (c.row_pairs) k.tokens_of_tile *= 2, k.no_splits = 1;
  k.blocks_each = blocks_alike(p, c);
  k.bytes_of_key = to_int((p.head_dim_qk + p.head_dim_v) * p.q.element_size);
  if (p.softcap > 0) fill_cap(p.scale, p.softcap, k);
  const auto out_of_block = static_cast<double>(c.tokens_of_tile) * static_cast<double>(std::abs(k.out_row_stride)) +
                            static_cast<double>(c.heads_of_tile) * static_cast<double>(std::abs(k.out_head_stride));
  k.plain_out = k.lse == nullptr && k.max_logits == nullptr && k.sinks == nullptr && k.out_scale == nullptr &&
                        out_of_block < 0x1p31
                    ? 1
                    : 0;
  return k;
}

kernels::Fp32Rows fp32_rows(const Problem& p) {
  const auto lies_in_fours = [](const void* data, int64_t size, std::initializer_list<int64_t> counts) {
    return std::ranges::all_of(counts, [](int64_t x) { return x % 4 == 0; }) &&
                   reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(4 * size) == 0
               ? 1
               : 0;
  };
  const auto rows = [&](const RowView& v, int64_t head_dim) {
    return v.dim_stride == 1
               ? lies_in_fours(v.data, v.element_size, {head_dim, v.row_stride, v.head_stride, v.batch_stride})
               : 0;
  };
  const auto plane = [&](const KvPlane& v, int64_t head_dim) {
    if (v.inner_stride != 1) return 0;
    return lies_in_fours(v.data, v.element_size,
                         {head_dim, v.page_stride, v.slot_stride, v.head_stride, v.contiguous ? 0 : v.pack,
                          v.contiguous ? 0 : v.outer_stride});
  };
  kernels::Fp32Rows r{};
  r.q = rows(p.q, p.head_dim_qk);
  if (p.dense_kv || p.new_tokens) r.dense_k = rows(p.k, p.head_dim_qk), r.dense_v = rows(p.v, p.head_dim_v);
  if (p.cache) r.cached_k = plane(p.cache.k, p.head_dim_qk), r.cached_v = plane(p.cache.v, p.head_dim_v);
  return r;
}

Maps describe_maps(const Problem& p, const Config& c) {
  Maps m;
  m.q = attention::row_map(p, p.q, p.heads_q, p.head_dim_qk, c.tokens_of_tile, c.heads_of_tile);
  if (c.dense) {
    m.dense_k = attention::row_map(p, p.k, p.heads_kv, p.head_dim_qk, c.keys, 1);
    m.dense_v = attention::row_map(p, p.v, p.heads_kv, p.head_dim_v, c.keys, 1);
  }
  if (c.gather > 0) return m;
  const int keys = attention::keys_of_box(p.cache, c.keys);
  if (c.x_packed) {
    m.k = attention::xpacked_k_map(p, keys);
    m.v = p.cache.v.element_size == 1 ? attention::xpacked_quantized_v_map(p, keys) : attention::xpacked_v_map(p, keys);
  } else if (c.cached) {
    m.k = attention::cache_map(p, p.cache.k, p.head_dim_qk, keys);
    m.v = attention::cache_map(p, p.cache.v, p.head_dim_v, keys);
  }
  return m;
}

}  // namespace attune::cuda::prefill
