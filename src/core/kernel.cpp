// SPDX-License-Identifier: Apache-2.0
#include "core/kernel.h"

#include <bit>
#include <iterator>
#include <limits>

#include "core/dtype.h"

namespace attune {
namespace {

constexpr AxisInfo kAxes[kNumAxes] = {
    {"queries", {"ragged", "fixed length", "q_rope"}},
    {"query dtype", {"float32", "float16", "bfloat16", "e4m3", "e5m2", "int8"}},
    {"KV source",
     {"dense", "paged cache", "contiguous cache", "cache + new tokens", "sparse slots", "sparse dense", "second cache",
      "ring buffer", "beams"}},
    {"KV format",
     {"float32", "float16", "bfloat16", "e4m3", "e5m2", "int8", "MLA-656", "MLA-584", "V part of K", "V beside K"}},
    {"KV scales", {ATTUNE_KV_SCALE_NAMES}},
    {"KV layout", {"NHD", "HND", "x-packed", "bytes"}},
    {"mask", {ATTUNE_MASK_NAMES}},
    {"score", {ATTUNE_SCORE_NAMES}},
    {"prologue", {"none", "dequantise", "bias", "IA3", "RoPE", "mRoPE", "log-n", "append", "power-of-two scales"}},
    {"output", {"float32", "float16", "bfloat16", "e4m3", "lse", "max_logits"}},
    {"determinism", {"run to run", "batch invariant"}},
};

// Of a query, an element of a cache, or an output.
constexpr uint32_t dtype_bit(int32_t dtype) { return 1u << (dtype - ATTUNE_FLOAT32); }
static_assert(dtype_bit(ATTUNE_FLOAT32) == use::kQF32 && dtype_bit(ATTUNE_INT8) == use::kQInt8 &&
              dtype_bit(ATTUNE_FLOAT32) == use::kF32 && dtype_bit(ATTUNE_INT8) == use::kInt8 &&
              dtype_bit(ATTUNE_FLOAT32) == use::kOutF32 && dtype_bit(ATTUNE_FLOAT8_E4M3) == use::kOutE4m3);

uint32_t format_bit(const KvCache& c, int32_t dtype) {
  switch (static_cast<attune_kv_format>(c.format->id)) {
    case ATTUNE_KV_PLAIN:
      break;
    case ATTUNE_KV_MLA_656:
      return use::kMla656;
    case ATTUNE_KV_MLA_584:
      return use::kMla584;
  }
  return dtype_bit(dtype);
}

uint32_t scale_bit(KvScale::Mode m) { return 1u << static_cast<int>(m); }

void add_cache(Traits& t, const KvCache& c, int32_t layout) {
  t[Axis::kKvFormat] |=
      format_bit(c, c.k.dtype) | format_bit(c, c.v.dtype) | (c.v_aliases_k ? use::kValiasesK : use::kVBesideK);
  t[Axis::kKvScales] |= scale_bit(c.k_scale.mode) | scale_bit(c.v_scale.mode);
  t[Axis::kKvLayout] |= 1u << layout;
}

}  // namespace

const AxisInfo& axis_info(Axis axis) { return kAxes[static_cast<int>(axis)]; }

std::string value_list(Axis axis, uint32_t bits) {
  std::string s;
  const AxisInfo& info = axis_info(axis);
  for (int i = 0; i < kMaxAxisValues && info.values[i] != nullptr; ++i) {
    if ((bits >> i & 1u) != 0) s += (s.empty() ? "" : ", ") + std::string(info.values[i]);
  }
  return s;
}

Traits traits_of(const Problem& p, const attune_attention& a) {
  Traits t;
  t[Axis::kQueries] = (p.cu_q ? use::kRagged : use::kFixed) | (p.q_rope ? use::kRopeApart : 0u);
  t[Axis::kQueryDtype] = dtype_bit(p.q.dtype);

  uint32_t& source = t[Axis::kKvSource];
  if (p.dense_kv) source |= p.sparse ? use::kSparseDense : use::kDense;
  if (p.cache) source |= p.sparse ? use::kSparseSlots : (p.cache.paged ? use::kPaged : use::kContiguous);
  if (p.new_tokens) source |= use::kNewTokens;
  if (p.extra_cache) source |= use::kSecondCache;
  if (p.cache.ring_capacity > 0) source |= use::kRing;
  if (p.cache_indirection) source |= use::kBeams;

  if (p.cache) add_cache(t, p.cache, a.cache.layout);
  if (p.extra_cache) add_cache(t, p.extra_cache, a.extra_cache.layout);
  if (p.dense_kv) {
    // Dense keys are plain elements in NHD order.
    KvCache dense;
    dense.format = kv_format(ATTUNE_KV_PLAIN);
    dense.k.dtype = p.k.dtype;
    dense.v.dtype = p.v.dtype;
    dense.v_aliases_k = p.v_aliases_k;
    add_cache(t, dense, ATTUNE_KV_NHD);
  }

  t[Axis::kMask] = p.mask_kinds() != 0 ? p.mask_kinds() : use::kNoMask;
  t[Axis::kScore] = use::kPlain | p.score_kinds();

  uint32_t& prologue = t[Axis::kPrologue];
  const Prologue& g = p.prologue;
  if (present(a.prologue.qkv_scale)) prologue |= use::kDequantize;
  if (g.q_bias || g.k_bias || g.v_bias) prologue |= use::kQkvBias;
  if (g.ia3_k || g.ia3_v) prologue |= use::kIa3;
  if (present(a.prologue.rope_cos_sin)) prologue |= g.mrope ? use::kMrope : use::kRope;
  if (g.logn) prologue |= use::kLogn;
  if (g.append) prologue |= use::kAppend;
  if (g.power_of_two_scales) prologue |= use::kPowerOfTwoScales;
  if (prologue == 0) prologue = use::kNoPrologue;

  uint32_t& output = t[Axis::kOutput];
  output = dtype_bit(p.out.dtype);
  if (p.lse) output |= use::kLse;
  if (p.max_logits) output |= use::kMaxLogits;
  t[Axis::kDeterminism] = use::kRunToRun | (p.batch_invariant ? use::kBatchInvariant : 0u);

  t.head_dim_qk = p.head_dim_qk;
  t.head_dim_v = p.head_dim_v;
  t.group = p.group;
  return t;
}

std::string Coverage::difference(const Traits& t) const {
  std::string s;
  auto add = [&](const std::string& x) { s += (s.empty() ? "" : "; ") + x; };
  for (int i = 0; i < kNumAxes; ++i) {
    if (const uint32_t missing = t.axes[i] & ~axes[i]; missing != 0) {
      add(std::string(kAxes[i].name) + ": " + value_list(static_cast<Axis>(i), missing));
    }
  }
  if (t.head_dim_qk > head_dim_qk_max) add(cat("head_dim_qk: ", t.head_dim_qk, " (at most ", head_dim_qk_max, ")"));
  if (t.head_dim_v > head_dim_v_max) add(cat("head_dim_v: ", t.head_dim_v, " (at most ", head_dim_v_max, ")"));
  if (t.group > group_max) add(cat("query heads a KV head: ", t.group, " (at most ", group_max, ")"));
  return s;
}

int Coverage::distance(const Traits& t) const {
  // A head_dim above twice the limit counts as two differences: a kernel of another dtype is nearer.
  const auto beyond = [](int64_t dim, int64_t most) { return (dim > most ? 1 : 0) + (dim > 2 * most ? 1 : 0); };
  int n = beyond(t.head_dim_qk, head_dim_qk_max) + beyond(t.head_dim_v, head_dim_v_max) + (t.group > group_max);
  for (int i = 0; i < kNumAxes; ++i) n += std::popcount(t.axes[i] & ~axes[i]);
  return n;
}

std::string Coverage::text() const {
  std::string s;
  for (int i = 0; i < kNumAxes; ++i)
    s += std::string(kAxes[i].name) + ": " + value_list(static_cast<Axis>(i), axes[i]) + "; ";
  const auto dims = [](std::string_view some, int64_t most) {
    return some.empty() ? cat("1..", most) : std::string(some);
  };
  s += "head_dim_qk: " + dims(head_dims_qk, head_dim_qk_max) + "; head_dim_v: " + dims(head_dims_v, head_dim_v_max);
  s += "; query heads a KV head: ";
  s += group_max == std::numeric_limits<int64_t>::max() ? std::string("any") : cat("1..", group_max);
  return s;
}

}  // namespace attune
