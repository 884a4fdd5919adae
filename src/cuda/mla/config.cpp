// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla/config.h"

#include <algorithm>
#include <bit>

#include "core/dtype.h"
#include "core/integers.h"
#include "cuda/attention/params.h"
#include "cuda/attention/prologue.h"
#include "cuda/attention/tensor_maps.h"
#include "cuda/attention/work_tiles.h"
#include "cuda/mla/kernel_choice.h"
#include "cuda/ops/params.h"
#include "mla/mma/shared_bytes.h"
#include "mla/shared_storage.h"

namespace attune::cuda::mla {
namespace {

using attention::kAlignment;
using kernels::kMlaBlockM;
using kernels::kMlaBlockN;

constexpr int kFewestKeysOfBox = 8;             // smaller pages take too many TMA copies
constexpr int64_t kMostTokensOfPage = 1 << 21;  // of the format whose scales lie behind a page's rows

bool is_packed(const KvCache& c) { return c && !c.format->plain; }

int keys_of_box(const KvCache& c) { return attention::keys_of_box(c, kMlaBlockN); }

bool strides_fit(const KvCache& c) {
  if (c.format->plain) return attention::strides_fit(c.k);
  return c.k.page_stride % kAlignment == 0 && c.k.slot_stride % kAlignment == 0;
}

std::string two_dtypes(const char* name, int32_t dtype, const Problem& p) {
  return cat(name, " of ", dtype_name(dtype), " with q of ", dtype_name(p.q.dtype), "; it takes one dtype for both");
}

std::string cache_refusal(const char* name, const KvCache& c, const Problem& p) {
  if (!c) return "";
  if (is_packed(c)) {
    if (p.q.dtype != ATTUNE_BFLOAT16)
      return cat("q of ", dtype_name(p.q.dtype), " over ", name, ", a packed one; it takes bfloat16");
    if (c.page_size > kMostTokensOfPage) return cat("pages of more than ", kMostTokensOfPage, " tokens in ", name);
  } else if (c.k.dtype != p.q.dtype && (c.k.dtype == ATTUNE_FLOAT16 || c.k.dtype == ATTUNE_BFLOAT16)) {
    return two_dtypes(name, c.k.dtype, p);  // others are not in the coverage
  }
  if (!strides_fit(c)) return cat("rows of ", name, " that do not lie at multiples of 16 bytes");
  return "";
}

// q and k come from the prologue, where there is one.
attention::Misaligned find_misaligned(const Problem& p) {
  return attention::find_misaligned(p, attention::has_prologue(p), false);
}

kernels::SlotList slot_list(const Problem& p, const SparseList& l) {
  kernels::SlotList k{};
  k.indices = l.indices;
  if (!p.cu_q) k.batch_stride = l.rows_per_batch == 0 ? p.fixed_q * l.row_stride : l.batch_stride;
  k.row_stride = l.row_stride, k.head_stride = l.head_stride, k.entry_stride = l.entry_stride;
  k.length = ops::int_table(l.length);
  k.length_by_row = l.length_by_row ? 1 : 0;
  k.topk = to_int(l.topk);
  return k;
}

// The rope channels of the queries: apart, or the last ones of q.
RowView rope_of(const Problem& p) {
  if (p.q_rope) return p.q_rope;
  RowView rope = p.q;
  if (rope.data != nullptr) rope.data += kernels::kMlaHeadDimV * rope.element_size;
  return rope;
}

kernels::RowPool cache_pool(const KvCache& c) {
  const int64_t size = c.k.element_size;
  kernels::RowPool pool{};
  pool.data = reinterpret_cast<const char*>(c.k.data);
  pool.page_stride = c.k.page_stride * size, pool.slot_stride = c.k.slot_stride * size,
  pool.head_stride = c.k.head_stride * size;
  pool.num_slots = to_int(c.num_slots());
  pool.page_size = to_int(std::max<int64_t>(1, c.page_size));
  pool.by_page_size = kernels::make_divisor(static_cast<unsigned>(pool.page_size));
  return pool;
}

kernels::RowPool dense_pool(const RowView& v) {
  const kernels::NewRows rows = attention::dense_rows(v);
  kernels::RowPool pool{};
  pool.data = rows.data;
  pool.slot_stride = rows.row_stride * v.element_size, pool.head_stride = rows.head_stride * v.element_size;
  pool.batch_stride = rows.batch_stride * v.element_size;
  return pool;  // by_page_size 0: all in one page
}

}  // namespace

kernels::MlaProducer choose_producer(const Problem& p) {
  switch (p.cache ? static_cast<attune_kv_format>(p.cache.format->id) : ATTUNE_KV_PLAIN) {
    case ATTUNE_KV_PLAIN:
      break;
    case ATTUNE_KV_MLA_656:
      return kernels::kMlaDequant656;
    case ATTUNE_KV_MLA_584:
      return kernels::kMlaDequant584;
  }
  if (p.sparse || (p.cache && keys_of_box(p.cache) < kFewestKeysOfBox)) return kernels::kMlaGather;
  return kernels::kMlaTma;
}

unsigned Config::threads() const {
  return static_cast<unsigned>(mma       ? kernels::mla_mma_threads(producer, rows, keys)
                               : m16     ? kernels::kMlaM16Threads
                               : swap_ab ? kernels::kMlaSwapAbThreads
                                         : kernels::mla_threads(producer, cluster));
}
unsigned Config::combine_blocks(int num_sms) const {
  return static_cast<unsigned>(std::clamp<int64_t>(max_row_pairs, 1, int64_t{2} * num_sms));
}
size_t Config::shared_bytes() const {
  return static_cast<size_t>(mma       ? kernels::mla_mma_shared_bytes(producer, head_dim_qk, rows, keys, stages)
                             : m16     ? kernels::mla_m16_shared_bytes(head_dim_qk)
                             : swap_ab ? kernels::mla_swap_ab_shared_bytes(rows)
                                       : kernels::mla_shared_bytes(producer, head_dim_qk));
}

void Config::count_row_pairs(const Problem& p, int num_sms) {
  // With fp32 partial outputs a pair of rows takes two steps of the combine kernel.
  const bool halves = out_dtype == ATTUNE_FLOAT32 || out_dtype == ATTUNE_FLOAT16;
  max_row_pairs = (max_work_tiles - num_sms) * (p.heads_q / heads_of_tile) *
                  (kernels::align_up(tokens_of_tile * heads_of_tile, 16) / 2) * (halves ? 2 : 1);
}

KernelSpec Config::main_kernel() const {
  KernelSpec spec{mma       ? "mla/mma.cu"
                  : m16     ? "mla/m16.cu"
                  : swap_ab ? "mla/swap_ab.cu"
                            : "mla/mla.cu",
                  mma       ? "attune_mla_mma"
                  : m16     ? "attune_mla_m16"
                  : swap_ab ? "attune_mla_swap_ab"
                            : "attune_mla",
                  {define("ATTUNE_HEAD_DIM_QK", head_dim_qk), define("ATTUNE_TYPE", dtype),
                   define("ATTUNE_OUT_TYPE", out_dtype), define("ATTUNE_LOADER", producer),
                   define("ATTUNE_SPARSE", sparse ? 1 : 0), define("ATTUNE_DENSE", dense ? 1 : 0)},
                  shared_bytes()};
  if (!mma) spec.defines.push_back(define("ATTUNE_CLUSTER", cluster));
  if (mask != 0) spec.defines.push_back(define("ATTUNE_MASK", mask));
  if (swap_ab || mma) spec.defines.push_back(define("ATTUNE_ROWS", rows));
  if (mma) {
    spec.defines.push_back(define("ATTUNE_KEYS", keys));
    spec.defines.push_back(define("ATTUNE_STAGES", stages));
  }
  return spec;
}

KernelSpec Config::schedule_kernel() const { return attention::schedule_kernel(*this, sparse, true); }

KernelSpec Config::combine_kernel() const {
  return {"mla/combine.cu", "attune_combine_mla", {define("ATTUNE_OUT_TYPE", out_dtype)}, 0};
}

std::string refusal(const Problem& p) {
  if (p.head_dim_v != kernels::kMlaHeadDimV || (p.head_dim_qk != 512 && p.head_dim_qk != 576))
    return cat("head_dim_qk ", p.head_dim_qk, " with head_dim_v ", p.head_dim_v, "; it takes 576 or 512 with 512");
  if (!(p.scale > 0)) return cat("softmax_scale ", p.scale, "; it takes positive ones");
  if (p.q_rope && p.dim_q != kernels::kMlaHeadDimV)
    return cat("q_rope beside ", p.dim_q, " channels of q; it takes ", kernels::kMlaHeadDimV);
  const bool copied = attention::has_prologue(p);  // q and k come from the prologue
  if (!copied && !attention::strides_fit(p.q)) return "rows of q that do not lie at multiples of 16 bytes";
  if (p.q_rope && !attention::strides_fit(p.q_rope)) return "rows of q_rope that do not lie at multiples of 16 bytes";
  const bool rows = p.dense_kv || p.new_tokens;
  if (rows && p.k.dtype != p.q.dtype) return two_dtypes("k", p.k.dtype, p);
  if (rows && !copied && !attention::strides_fit(p.k)) return "rows of k that do not lie at multiples of 16 bytes";
  if (std::string why = cache_refusal("cache", p.cache, p); !why.empty()) return why;
  if (std::string why = cache_refusal("extra_cache", p.extra_cache, p); !why.empty()) return why;
  if (p.extra_cache && p.extra_cache.format != p.cache.format)
    return cat("extra_cache of format ", p.extra_cache.format->name, " beside a cache of format ", p.cache.format->name,
               "; it takes one for both");
  if (p.total_q * p.heads_q >= int64_t{1} << 31) return "2^31 or more rows of queries and heads";
  if (std::string why = attention::prologue_refusal(p); !why.empty()) return why;
  return attention::refusal_of(find_misaligned(p));
}

Config choose_config(const Problem& p, int num_sms) {
  Config c;
  c.head_dim_qk = static_cast<int>(p.head_dim_qk);
  c.dtype = p.q.dtype;
  c.out_dtype = p.out.dtype;
  c.producer = choose_producer(p);
  c.sparse = p.sparse;
  c.dense = p.dense_kv || p.new_tokens;
  c.mask = attention::mask_kinds(p);
  c.keys = kMlaBlockN;
  c.partials = {kMlaBlockM, kernels::kMlaPartialStats, kernels::kMlaHeadDimV, true};
  const KernelChoice choice = choose_kernel(p, c.producer, num_sms);
  c.rows = choice.rows;
  c.swap_ab = c.rows < kMlaBlockM && c.producer == kernels::kMlaDequant656;
  c.m16 = c.rows == kernels::kMlaM16Rows && !c.swap_ab;
  c.fewest_tiles = c.whole_tiles = choice.fewest_tiles;
  if (c.m16 && c.producer == kernels::kMlaTma) c.producer = kernels::kMlaGather;
  c.heads_of_tile = attention::choose_heads_of_tile(p.group, choice.rows, tokens_of_keys(p));
  c.tokens_of_tile = p.sparse || c.m16 || c.swap_ab ? 1 : kMlaBlockM / c.heads_of_tile;

  attention::choose_grid(p, num_sms, c);
  c.count_row_pairs(p, num_sms);
  // Head tiles of one KV head read the same keys: clusters multicast them, or dequantize them together.
  const bool shares = !c.m16 && !c.swap_ab && (is_packed(p.cache) || (c.producer == kernels::kMlaTma && p.cache));
  if (shares && p.group / c.heads_of_tile % 2 == 0 && c.blocks % 2 == 0) c.cluster = 2;
  return c;
}

void check_run(const Problem& p, const Config& c) {
  attention::check_aligned(find_misaligned(p), c.name());
  attention::require_still_taken(c.name(), refusal(p));
  require(c.producer != kernels::kMlaTma || !p.cache || keys_of_box(p.cache) >= kFewestKeysOfBox, "cache.page_size is ",
          p.cache.page_size, "; the plan was made for pages of multiples of ", kFewestKeysOfBox, " tokens");
}

kernels::WorkTileParams to_params(const Problem& p, const Config& c, void* workspace) {
  kernels::WorkTileParams k = attention::to_params(p, {}, c, workspace);
  if (p.sparse) {
    k.list_of_slots = slot_list(p, p.list);
    if (p.extra_cache) k.list_of_extra = slot_list(p, p.extra_list);
  }
  if (p.cache) k.pools[0] = cache_pool(p.cache);
  if (c.dense) k.pools[1] = dense_pool(p.k);
  if (p.extra_cache) k.pools[1] = cache_pool(p.extra_cache);
  const RowView rope = rope_of(p);
  const attention::RowStrides strides = attention::row_strides(p, rope);
  k.q_rope = reinterpret_cast<const char*>(rope.data);
  k.q_rope_batch_stride = strides.batch, k.q_rope_row_stride = strides.row, k.q_rope_head_stride = strides.head;
  return k;
}

Maps describe_maps(const Problem& p, const Config& c) {
  Maps m;
  const auto query_map = [&](const RowView& rows, int64_t channels) {
    return attention::row_map(p, rows, p.heads_q, channels, c.tokens_of_tile, c.heads_of_tile);
  };
  m.q = query_map(p.q, kernels::kMlaHeadDimV);
  if (p.head_dim_qk > kernels::kMlaHeadDimV) m.q_rope = query_map(rope_of(p), p.head_dim_qk - kernels::kMlaHeadDimV);
  if (c.producer != kernels::kMlaTma) return m;
  if (p.dense_kv || p.new_tokens) m.dense_k = attention::row_map(p, p.k, p.heads_kv, p.head_dim_qk, kMlaBlockN, 1);
  if (p.cache) m.k = attention::cache_map(p, p.cache.k, p.head_dim_qk, keys_of_box(p.cache));
  return m;
}

}  // namespace attune::cuda::mla
