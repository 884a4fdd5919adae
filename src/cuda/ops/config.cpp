// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/config.h"

#include <algorithm>
#include <bit>

#include "core/dtype.h"
#include "core/integers.h"
#include "core/problem.h"
#include "cuda/ops/params.h"

namespace attune::cuda::ops {
namespace {

constexpr int kRun = 8;

int64_t units_of(int64_t rotary_dim, int64_t head_dim, int width) {
  return ((head_dim - rotary_dim) / width + 1) / 2 + rotary_dim / (2 * width);
}

// The common dtype of the tensors that are given; 0 where they differ.
template <class... Views>
int common_type(const Views&... views) {
  int type = -1;
  const auto look = [&](const auto& v) {
    if (v) type = type == -1 || type == v.dtype ? v.dtype : 0;
  };
  (look(views), ...);
  return std::max(type, 0);
}

int format_of(const KvCache& c) {
  return !c || c.format->plain ? 0 : static_cast<int>(c.format->token_bytes + c.format->scale_bytes);
}

// Chooses how many lanes share a row, the units of each, and the rows and blocks that registers allow
// (docs/kernels/ops.md).
void choose_threads(int64_t units, Config& c) {
  if (c.packed_vectors()) {
    c.lanes = 32, c.units = 1, c.rows = 1, c.blocks_per_sm = c.prepare && c.row_type == ATTUNE_FLOAT32 ? 2 : 4;
    return;
  }
  const bool spread = c.width == 1 || c.format != 0;
  c.lanes = spread ? 32 : static_cast<int>(std::clamp<uint64_t>(std::bit_ceil(static_cast<uint64_t>(units)), 4, 32));
  c.units = static_cast<int>(std::max<int64_t>(1, ceil_div(units, c.lanes)));
  const bool wide = c.width == kRun && (c.row_type == 0 || c.row_type == ATTUNE_FLOAT32);  // two vectors a run
  const bool exact = c.head_dim == c.lanes * c.units * 2 * kRun;                           // every thread has channels
  c.rows = c.units <= 2 && !wide ? 2 : 1;
  if (c.entry == Entry::kFetch) {
    c.blocks_per_sm = c.units == 1 ? 4 : c.units == 2 ? 3 : 1;
    return;
  }
  if (c.units > 1) c.rows = 1;
  if (c.units > 4 || (c.prologue && c.units > 1 && c.width == kRun)) {
    c.blocks_per_sm = 1;
  } else if (c.prologue || c.units > 1) {
    c.blocks_per_sm = c.prologue || wide ? 2 : 3;
  } else {
    c.blocks_per_sm = exact ? 4 : 3;
  }
}

// Rows that vectors cannot move share one kernel for all types, so that few are compiled.
void generalise(Config& c) {
  if (c.width == kRun) return;
  c.row_type = c.out_type = c.cache_type = 0;
  c.scales = c.format == 0 ? kernels::kScalesAtRunTime : 0;
}

int scales_of(const KvCache& c, bool with_v) {
  if (!c.format->plain) return 0;
  if (with_v && c.k_scale.mode != c.v_scale.mode) return kernels::kScalesAtRunTime;
  return static_cast<int>(c.k_scale.mode);
}

int cache_type(const KvCache& c, bool with_v) {
  return !c.format->plain || (with_v && c.k.dtype != c.v.dtype) ? 0 : c.k.dtype;
}

// The largest power of two that divides both.
int64_t common_power(int64_t a, int64_t b) {
  const auto both = static_cast<uint64_t>(a | b);
  return both == 0 ? 1 : int64_t{1} << std::countr_zero(both);
}

// Rows of more channels than these do not fit a thread's registers.
void check_head_dims(int64_t qk, int64_t v) {
  require(qk <= kMaxHeadDim, "cache.k has head_dim ", qk, "; it must be at most ", kMaxHeadDim);
  require(v <= kMaxHeadDim, "cache.v has head_dim ", v, "; it must be at most ", kMaxHeadDim);
}

// Whether the prologue is RoPE alone, on the last channels of k and, in place, of q: those that a packed row keeps in
// bf16.
bool is_rope_of_tail(const PrepareProblem& op) {
  const Prologue& p = op.prologue;
  const kernels::PrologueParams k = prologue_params(p);
  if (!p.append || !op.k || op.cache.format->plain || k.cos_sin_vector == 0 || k.components == 3) return false;
  const bool others = p.scaled || p.q_bias || p.k_bias || p.v_bias || p.ia3_k || p.ia3_v || p.logn;
  if (others || p.rope_offset != op.cache.format->nope || p.rope_offset + p.rotary_dim != op.head_dim_qk) return false;
  const RowView &q = op.q, &out = op.q_out;
  const bool in_place = q.data == out.data && q.dtype == out.dtype && q.rows_per_batch == out.rows_per_batch &&
                        q.batch_stride == out.batch_stride && q.row_stride == out.row_stride &&
                        q.head_stride == out.head_stride;
  return !op.k_out && (!out || in_place) && dtype_size(op.k.dtype) >= 2;
}

Config choose_cache_op(const CacheProblem& op, Entry entry) {
  const KvCache& cache = op.cache;
  const bool with_v = static_cast<bool>(op.v);
  check_head_dims(cache.head_dim_qk, with_v ? cache.head_dim_v : 0);
  Config c;
  c.entry = entry;
  c.format = format_of(cache);
  const bool vectors =
      has_vectors(cache) && has_vectors(op.k, cache.head_dim_qk) && has_vectors(op.v, cache.head_dim_v);
  c.width = vectors ? kRun : 1;
  c.row_type = common_type(op.k, op.v);
  c.out_type = c.row_type;
  c.cache_type = cache_type(cache, with_v);
  c.scales = scales_of(cache, with_v);
  generalise(c);
  const int64_t dim = std::max(cache.head_dim_qk, with_v ? cache.head_dim_v : 0);
  if (vectors && c.format == 0 && (!with_v || cache.head_dim_v == cache.head_dim_qk))
    c.head_dim = static_cast<int>(cache.head_dim_qk);
  choose_threads(units_of(0, dim, c.width), c);
  c.rows_of_token = cache.num_heads * (with_v ? 2 : 1);
  c.groups = common_power(cache.num_heads, 0);
  return c;
}

}  // namespace

bool Config::packed_vectors() const { return format != 0 && width == kRun && (!prepare || tail_only); }

KernelSpec Config::spec() const {
  if (entry == Entry::kMerge) {
    return {"rows/merge.cu",
            "attune_merge",
            {define("ATTUNE_WIDTH", width), define("ATTUNE_LANES", lanes), define("ATTUNE_ROW_TYPE", row_type),
             define("ATTUNE_OUT_TYPE", out_type)},
            0};
  }
  if (packed_vectors()) {
    const bool stores = entry == Entry::kStore;
    KernelSpec spec{stores ? "rows/mla_store.cu" : "rows/mla_fetch.cu",
                    stores ? "attune_store_mla" : "attune_fetch_mla",
                    {define("ATTUNE_FORMAT", format), define("ATTUNE_ROW_TYPE", row_type),
                     define("ATTUNE_BLOCKS_PER_SM", blocks_per_sm)},
                    0};
    if (stores) spec.defines.push_back(define("ATTUNE_PREPARE", prepare ? 1 : 0));
    return spec;
  }
  KernelSpec spec{
      entry == Entry::kStore ? "rows/store.cu" : "rows/fetch.cu",
      entry == Entry::kStore ? "attune_store_rows" : "attune_fetch_rows",
      {define("ATTUNE_WIDTH", width), define("ATTUNE_LANES", lanes), define("ATTUNE_UNITS", units),
       define("ATTUNE_ROWS", rows), define("ATTUNE_BLOCKS_PER_SM", blocks_per_sm), define("ATTUNE_ROW_TYPE", row_type),
       define("ATTUNE_OUT_TYPE", out_type), define("ATTUNE_CACHE_TYPE", cache_type), define("ATTUNE_FORMAT", format),
       define("ATTUNE_SCALES", scales), define("ATTUNE_HEAD_DIM", head_dim)},
      0};
  if (entry == Entry::kStore) {
    spec.defines.push_back(define("ATTUNE_PREPARE", prepare ? 1 : 0));
    spec.defines.push_back(define("ATTUNE_PROLOGUE", prologue ? 1 : 0));
    if (copies) spec.defines.push_back(define("ATTUNE_COPIES", 1));
  }
  return spec;
}

uint64_t Config::key() const {
  uint64_t key = static_cast<uint64_t>(entry);
  const auto add = [&key](uint64_t field, uint64_t values) { key = key * values + field; };
  add(width == kRun ? 1 : 0, 2);
  add(static_cast<uint64_t>(lanes), 33);
  add(static_cast<uint64_t>(units), 16);
  for (const int field : {rows, blocks_per_sm, row_type, out_type, cache_type, scales})
    add(static_cast<uint64_t>(field), 10);
  add(static_cast<uint64_t>(format), 1024);
  add(static_cast<uint64_t>(head_dim), 1024);
  add((copies ? 8 : 0) + (tail_only ? 4 : 0) + (prepare ? 2 : 0) + (prologue ? 1 : 0), 16);
  return key;
}

int Config::tile_tokens(int64_t total, int num_sms) const {
  // Iterations of a block over its tokens, and over tokens and rows: enough to hide its launch.
  constexpr int64_t kVisits = 4, kRounds = 16;
  const int64_t at_once = kernels::kRowsThreads / lanes, tokens = std::max<int64_t>(1, at_once / groups);
  const int64_t visits = std::max(kVisits, kRounds * at_once / std::max<int64_t>(1, rows_of_token * tokens));
  const int64_t by_device = total / (4 * num_sms);  // small inputs are spread over all multiprocessors
  return static_cast<int>(std::clamp<int64_t>(std::min(visits * tokens, by_device), 1, kernels::kMaxTileTokens));
}

int Config::groups_shift(int tile_tokens) const {
  const uint64_t at_once = static_cast<uint64_t>(kernels::kRowsThreads / lanes);
  // Fewer tokens than threads for them: the other threads take further rows of each token.
  const uint64_t least = at_once / std::bit_ceil(static_cast<uint64_t>(tile_tokens));
  return std::countr_zero(std::min(at_once, std::max(static_cast<uint64_t>(groups), least)));
}

Config choose_store(const PrepareProblem& op) {
  Config c;
  c.entry = Entry::kStore;
  const bool append = op.prologue.append, has_rope = op.prologue.has_rope();
  const int64_t rotary = has_rope ? op.prologue.rotary_dim : 0, dim_k = op.head_dim_qk,
                dim_v = op.v ? op.head_dim_v : 0;
  bool vectors = rotary % (2 * kRun) == 0 && op.prologue.rope_offset % kRun == 0;
  for (const RowView* v : {&op.q, &op.k, &op.q_out, &op.k_out}) vectors = vectors && has_vectors(*v, dim_k);
  for (const RowView* v : {&op.v, &op.v_out}) vectors = vectors && has_vectors(*v, dim_v);
  if (append) vectors = vectors && has_vectors(op.cache);
  c.width = vectors ? kRun : 1;
  c.prepare = true;
  c.prologue = op.prologue.any;
  c.copies = op.copies;
  c.row_type = common_type(op.q, op.k, op.v);
  c.out_type = op.q_out || op.k_out || op.v_out ? common_type(op.q_out, op.k_out, op.v_out) : c.row_type;
  if (append) {
    c.format = format_of(op.cache);
    c.cache_type = cache_type(op.cache, static_cast<bool>(op.v));
    c.scales = scales_of(op.cache, static_cast<bool>(op.v));
  }
  c.tail_only = is_rope_of_tail(op) && c.row_type != 0;
  generalise(c);
  if (vectors && (!op.v || dim_k == 0 || dim_v == dim_k)) c.head_dim = static_cast<int>(std::max(dim_k, dim_v));
  choose_threads(std::max(units_of(rotary, dim_k, c.width), units_of(0, dim_v, c.width)), c);
  c.rows_of_token = op.heads_q + 2 * op.heads_kv;
  c.groups = common_power(op.q_out ? op.heads_q : 0, op.heads_kv);
  return c;
}

Config choose_store(const CacheProblem& op) { return choose_cache_op(op, Entry::kStore); }
Config choose_fetch(const CacheProblem& op) { return choose_cache_op(op, Entry::kFetch); }

Config choose_merge(const MergeProblem& op) {
  Config c;
  c.entry = Entry::kMerge;
  const bool vectors =
      has_vectors(op.partial_out, op.head_dim_v) && has_vectors(op.out, op.head_dim_v) && op.out_part_bytes % 16 == 0;
  c.width = vectors ? kRun : 1;
  c.lanes = vectors && op.head_dim_v <= 16 * kRun ? 16 : 32;
  if (vectors) c.row_type = op.partial_out.dtype, c.out_type = op.out.dtype;
  return c;
}

}  // namespace attune::cuda::ops
