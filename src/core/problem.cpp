// SPDX-License-Identifier: Apache-2.0
#include "core/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/dtype.h"
#include "core/integers.h"

namespace attune {
namespace {

void read_rope_queries(Problem& p, const attune_attention& a, Data data) {
  require(a.q.dtype == ATTUNE_FLOAT32 || a.q.dtype == ATTUNE_FLOAT16 || a.q.dtype == ATTUNE_BFLOAT16,
          "q_rope is set, but q is ", dtype_name(a.q.dtype), "; with q_rope it must be float32, float16 or bfloat16");
  check_tensor("q_rope", a.q_rope, {a.q.dtype}, {a.q.rank}, data);
  for (int i = 0; i + 1 < a.q.rank; ++i) check_extent("q_rope", a.q_rope, i, a.q.shape[i], "as q");
  p.q_rope = row_view(a.q_rope);
  p.dim_q_rope = a.q_rope.shape[a.q.rank - 1];
  p.head_dim_qk = p.dim_q + p.dim_q_rope;
  require(p.dim_q_rope >= 1 && p.head_dim_qk <= kMaxHeadDim, "q_rope has ", p.dim_q_rope, " channels beside the ",
          p.dim_q, " of q; it must have 1 or more, and both together at most ", kMaxHeadDim);
}

void read_queries(Problem& p, const attune_attention& a, Data data) {
  check_tensor("q", a.q, kInputs, {3, 4}, data);
  p.q = row_view(a.q);
  p.total_q = p.q.rows;
  p.heads_q = a.q.shape[a.q.rank - 2];
  p.head_dim_qk = p.dim_q = a.q.shape[a.q.rank - 1];
  require(p.heads_q >= 1, "q has ", p.heads_q, " heads; it must have at least 1");
  require(p.dim_q >= 1 && p.dim_q <= kMaxHeadDim, "q has head_dim_qk ", p.dim_q, "; it must be 1..", kMaxHeadDim);
  if (present(a.q_rope)) read_rope_queries(p, a, data);
  if (a.q.rank == 4) {
    require(!present(a.cu_seqlens_q), "cu_seqlens_q is set, but q has rank 4, so each sequence has q.shape[1] queries");
    p.batch = a.q.shape[0];
    p.fixed_q = a.q.shape[1];
  } else if (present(a.cu_seqlens_q)) {
    p.cu_q = int_vector("cu_seqlens_q", a.cu_seqlens_q, -1, "batch + 1", data);
    p.batch = p.cu_q.cols - 1;
  } else if (present(a.cache.k)) {
    p.batch = p.total_q;
    p.fixed_q = 1;
  } else {
    p.batch = 1;
    p.fixed_q = p.total_q;
  }
}

// k and v beside a cache are the new tokens, those of the queries.
void read_new_tokens(Problem& p, const attune_attention& a) {
  p.new_tokens = true;
  require(!present(a.cu_seqlens_kv),
          "cu_seqlens_kv is set, but with a cache k and v are the tokens of the queries (cu_seqlens_q)");
  require(a.k.rank == a.q.rank, "k.rank is ", a.k.rank,
          "; with a cache k holds the tokens of the queries, so it must be ", a.q.rank, " as q");
  for (int i = 0; i + 2 < a.q.rank; ++i)
    check_extent("k", a.k, i, a.q.shape[i], "as q: the new tokens are those of the queries");
}

// k and v without a cache are all keys: finds the rows of each sequence.
void read_dense_sequences(Problem& p, const attune_attention& a, Data data) {
  p.dense_kv = true;
  if (a.k.rank == 4) {
    require(!present(a.cu_seqlens_kv), "cu_seqlens_kv is set, but k has rank 4, so each sequence has k.shape[1] keys");
    check_extent("k", a.k, 0, p.batch, "batch");
    p.fixed_kv = a.k.shape[1];
  } else if (present(a.cu_seqlens_kv)) {
    p.cu_kv = int_vector("cu_seqlens_kv", a.cu_seqlens_kv, p.batch + 1, "batch + 1", data);
  } else if (p.cu_q) {
    require(p.k.rows == p.total_q, "k has ", p.k.rows, " row", plural_s(p.k.rows), " and q ", p.total_q,
            "; where they differ cu_seqlens_kv is needed");
    p.cu_kv = p.cu_q;
  } else {
    require(p.batch == 1, "k has rank 3 and cu_seqlens_kv is absent, so it is one sequence, but the batch is ",
            p.batch);
    p.fixed_kv = p.k.rows;
  }
}

void read_dense(Problem& p, const attune_attention& a, Data data) {
  if (!present(a.k)) {
    require(!present(a.v), "v is set, but k is absent");
    require(!present(a.cu_seqlens_kv), "cu_seqlens_kv is set, but k is absent; a cache has its lengths in seqused_kv");
    return;
  }
  check_tensor("k", a.k, kInputs, {3, 4}, data);
  p.k = row_view(a.k);
  p.heads_kv = a.k.shape[a.k.rank - 2];
  check_extent("k", a.k, a.k.rank - 1, p.head_dim_qk, p.q_rope ? "that of q and q_rope together" : "head_dim_qk of q");
  if (present(a.v)) {
    check_tensor("v", a.v, kInputs, {a.k.rank}, data);
    for (int i = 0; i + 1 < a.k.rank; ++i) check_extent("v", a.v, i, a.k.shape[i], "as k");
    p.head_dim_v = a.v.shape[a.v.rank - 1];
    p.v = row_view(a.v);
    require(a.head_dim_v == 0 || a.head_dim_v == p.head_dim_v, "head_dim_v is ", a.head_dim_v, ", but v has ",
            p.head_dim_v);
  } else {
    require(a.head_dim_v >= 1 && a.head_dim_v <= p.head_dim_qk,
            "v is absent, so V is the first head_dim_v columns of k, and head_dim_v is ", a.head_dim_v,
            "; it must be 1..", p.head_dim_qk);
    p.head_dim_v = a.head_dim_v;
    p.v = p.k;
    p.v_aliases_k = true;
  }
  if (present(a.cache.k)) {
    read_new_tokens(p, a);
  } else {
    read_dense_sequences(p, a, data);
  }
}

SparseList read_list(const char* name, const char* length_name, const attune_tensor& t, const attune_tensor& length,
                     const Problem& p, const attune_attention& a, Data data) {
  SparseList s;
  if (!present(t)) {
    require(!present(length), length_name, " is set, but ", name, " is absent");
    return s;
  }
  check_tensor(name, t, {ATTUNE_INT32}, {2, 3}, data);
  s.indices = static_cast<const int32_t*>(t.data);
  s.topk = t.shape[t.rank - 1];
  s.entry_stride = t.stride[t.rank - 1];
  if (t.rank == 3 && a.q.rank == 4) {
    check_extent(name, t, 0, p.batch, "batch");
    check_extent(name, t, 1, p.fixed_q, "seqlen_q");
    s.rows_per_batch = std::max<int64_t>(p.fixed_q, 1);
    s.batch_stride = p.batch > 1 ? t.stride[0] : 0;
    s.row_stride = p.fixed_q > 1 ? t.stride[1] : 0;
  } else {
    check_extent(name, t, 0, p.total_q, "total_q");
    s.row_stride = p.total_q > 1 ? t.stride[0] : 0;
    if (t.rank == 3) {
      check_extent(name, t, 1, p.heads_kv, "num_heads_kv");
      s.head_stride = t.shape[1] > 1 ? t.stride[1] : 0;
    }
  }
  if (present(length)) {
    check_tensor(length_name, length, {ATTUNE_INT32}, {1}, data);
    require(length.shape[0] == p.batch || length.shape[0] == p.total_q, length_name, ".shape[0] is ", length.shape[0],
            "; it must be ", p.batch, " (batch) or ", p.total_q, " (total_q)");
    s.length = int_view(length);
    s.length_by_row = length.shape[0] != p.batch;
  }
  return s;
}

void read_cache(Problem& p, const attune_attention& a, Data data) {
  if (!present(a.cache.k)) {
    make_kv_cache("cache", a.cache, CacheUse::kSequences, p.batch, 0, 0, data);  // throws if its other fields are set
    require(present(a.k), "k and cache.k are both absent: there are no keys");
    return;
  }
  const CacheUse use = p.sparse ? CacheUse::kSlots : CacheUse::kSequences;
  const int64_t head_dim_v = p.head_dim_v != 0 ? p.head_dim_v : a.head_dim_v;
  p.cache = make_kv_cache("cache", a.cache, use, p.batch, p.head_dim_qk, head_dim_v, data);
  if (present(a.k)) {
    require(p.cache.num_heads == p.heads_kv, "cache has ", p.cache.num_heads, " KV heads, but k has ", p.heads_kv);
    require(p.cache.v_aliases_k == p.v_aliases_k, "v and cache.v must be both present or both absent (V part of K)");
  }
  p.heads_kv = p.cache.num_heads;
  p.head_dim_v = p.cache.head_dim_v;
  p.v_aliases_k = p.cache.v_aliases_k;
}

// The second pool of slots.
void read_extra_cache(Problem& p, const attune_attention& a, Data data) {
  if (!present(a.extra_indices)) {
    require(!present(a.extra_cache.k), "extra_cache is set, but extra_indices is absent");
    make_kv_cache("extra_cache", a.extra_cache, CacheUse::kSlots, p.batch, 0, 0, data);  // as above
    return;
  }
  require(p.sparse && present(a.cache.k), "extra_indices is set, but the first pool is not a cache with indices");
  p.extra_cache =
      make_kv_cache("extra_cache", a.extra_cache, CacheUse::kSlots, p.batch, p.head_dim_qk, p.head_dim_v, data);
  require(static_cast<bool>(p.extra_cache), "extra_indices is set, but extra_cache.k is absent");
  require(p.extra_cache.num_heads == p.heads_kv, "extra_cache has ", p.extra_cache.num_heads,
          " KV heads, but cache has ", p.heads_kv);
}

// Refuses what needs positions beside indices, which name slots.
void refuse_beside_indices(const Problem& p, const attune_attention& a) {
  require(!p.new_tokens,
          "k is set beside cache and indices; append the new tokens first (attune_cache_op, attune_qkv_prepare)");
  const auto off = [](bool is_off, const auto&... what) {
    require(is_off, what...,
            ", but indices choose the keys; causal must be 0, window_left and window_right -1, "
            "mask_bits and bidirectional_ranges absent");
  };
  off(a.causal == 0, "causal is ", a.causal);
  off(a.window_left < 0, "window_left is ", a.window_left);
  off(a.window_right < 0, "window_right is ", a.window_right);
  off(!present(a.mask_bits), "mask_bits is set");
  off(!present(a.bidirectional_ranges), "bidirectional_ranges is set");
  const auto absent = [](const char* name, const attune_tensor& t) {
    require(!present(t), name,
            " is set, but indices have no positions; alibi_slopes, bias, new_token_bias and "
            "t5_bias must be absent");
  };
  absent("alibi_slopes", a.alibi_slopes), absent("bias", a.bias);
  absent("new_token_bias", a.new_token_bias), absent("t5_bias", a.t5_bias);
}

void read_kv(Problem& p, const attune_attention& a, Data data) {
  p.sparse = present(a.indices);
  read_dense(p, a, data);
  read_cache(p, a, data);
  require(p.head_dim_v >= 1 && p.head_dim_v <= kMaxHeadDim, "head_dim_v is ", p.head_dim_v, "; it must be 1..",
          kMaxHeadDim);
  require(p.heads_kv >= 1, "k has ", p.heads_kv, " heads; it must have at least 1");
  require(p.heads_q % p.heads_kv == 0, "num_heads_q is ", p.heads_q, "; it must be a multiple of num_heads_kv (",
          p.heads_kv, ")");
  p.group = p.heads_q / p.heads_kv;

  p.seqused = int_vector("seqused_kv", a.seqused_kv, p.batch, "batch", data);
  if (p.cache && p.sparse) {
    require(!present(a.seqused_kv), "seqused_kv is set, but indices name slots of the cache, not positions");
  } else if (p.cache) {
    require(present(a.seqused_kv), "seqused_kv is absent, but a cache needs it");
  }

  p.list = read_list("indices", "topk_length", a.indices, a.topk_length, p, a, data);
  read_extra_cache(p, a, data);
  p.extra_list = read_list("extra_indices", "extra_topk_length", a.extra_indices, a.extra_topk_length, p, a, data);
  if (p.sparse) refuse_beside_indices(p, a);
}

void read_beams(Problem& p, const attune_attention& a, Data data) {
  require(a.beam_width >= 0, "beam_width is ", a.beam_width, "; it must be >= 0");
  if (!present(a.cache_indirection)) {
    require(a.beam_width <= 1, "beam_width is ", a.beam_width, ", but cache_indirection is absent");
    require(!present(a.beam_prompt_length), "beam_prompt_length is set, but cache_indirection is absent");
    return;
  }
  require(p.cache && !p.sparse, "cache_indirection needs a paged or contiguous cache");
  require(a.beam_width >= 1, "beam_width is ", a.beam_width, "; with cache_indirection it must be >= 1");
  require(p.batch % a.beam_width == 0, "the batch of ", p.batch, " row", plural_s(p.batch),
          " is not a multiple of beam_width (", a.beam_width, ")");
  check_tensor("cache_indirection", a.cache_indirection, {ATTUNE_INT32}, {2}, data);
  check_extent("cache_indirection", a.cache_indirection, 0, p.batch, "batch");
  p.cache_indirection = int_view(a.cache_indirection);
  p.beam_prompt_length = int_vector("beam_prompt_length", a.beam_prompt_length, p.batch, "batch", data);
  p.beam_width = a.beam_width;
}

void read_mask(Problem& p, const attune_attention& a, Data data) {
  check_flag("causal", a.causal);
  check_flag("skip_decode", a.skip_decode);
  check_flag("zero_finished", a.zero_finished);
  require(a.window_left >= -1, "window_left is ", a.window_left, "; it must be >= 0, or -1 for no limit");
  require(a.window_right >= -1, "window_right is ", a.window_right, "; it must be >= 0, or -1 for no limit");
  constexpr int64_t kFar = int64_t{1} << 40;  // beyond any position; keeps p + window in range
  p.causal = a.causal == 1;
  p.window_left = std::min(a.window_left, kFar);
  p.window_right = std::min(a.window_right, kFar);
  p.skip_decode = a.skip_decode == 1;
  p.zero_finished = a.zero_finished == 1;
  if (p.cache.ring_capacity > 0) {
    // The ring must hold the window_left keys before a query and, without new tokens, the query's own token.
    const int64_t most = p.cache.ring_capacity - (p.new_tokens ? 0 : 1);
    require(a.window_left <= most, "window_left is ", a.window_left, "; a ring of ", p.cache.ring_capacity, " token",
            plural_s(p.cache.ring_capacity), " serves at most ", most, " (or -1: whatever the ring retains)");
  }
  if (present(a.mask_bits)) {
    check_tensor("mask_bits", a.mask_bits, {ATTUNE_UINT8}, {2, 3}, data);
    check_extent("mask_bits", a.mask_bits, 0, p.total_q, "total_q");
    if (a.mask_bits.rank == 3) check_extent("mask_bits", a.mask_bits, 1, p.heads_q, "num_heads_q");
    const int last = a.mask_bits.rank - 1;
    KeyMasks& m = p.key_masks;
    m.has_bits = 1;
    m.bits = static_cast<const uint8_t*>(a.mask_bits.data);
    m.row_stride = a.mask_bits.stride[0];
    m.head_stride = last == 2 ? a.mask_bits.stride[1] : 0;
    m.byte_stride = a.mask_bits.stride[last];
    m.columns = to_int(a.mask_bits.shape[last] * 8);
    const IntView start = int_vector("mask_start", a.mask_start, p.batch, "batch", data);
    if (start) m.start = {start.data, start.row_stride, start.col_stride};
  } else {
    require(!present(a.mask_start), "mask_start is set, but mask_bits is absent");
  }
  if (present(a.bidirectional_ranges)) {
    const attune_tensor& t = a.bidirectional_ranges;
    check_tensor("bidirectional_ranges", t, {ATTUNE_INT32}, {3}, data);
    check_extent("bidirectional_ranges", t, 0, p.batch, "batch");
    check_extent("bidirectional_ranges", t, 2, 2, "first and last");
    p.has_ranges = true;
    p.ranges = static_cast<const int32_t*>(t.data);
    p.num_ranges = t.shape[1];
    p.range_batch_stride = t.stride[0];
    p.range_stride = t.stride[1];
    p.range_end_stride = t.stride[2];
  }
  if (present(a.finished)) {
    check_tensor("finished", a.finished, {ATTUNE_UINT8}, {1}, data);
    check_extent("finished", a.finished, 0, p.batch, "batch");
    p.has_finished = true;
    p.finished = static_cast<const uint8_t*>(a.finished.data);
    p.finished_stride = a.finished.stride[0];
  }
}

void read_score(Problem& p, const attune_attention& a, Data data) {
  require(std::isfinite(a.softmax_scale), "softmax_scale is ", a.softmax_scale,
          "; it must be finite (0: 1 / sqrt(head_dim_qk))");
  p.scale =
      a.softmax_scale != 0 ? a.softmax_scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.head_dim_qk)));
  require(std::isfinite(a.softcap) && a.softcap >= 0, "softcap is ", a.softcap,
          "; it must be finite and >= 0 (0: off)");
  p.softcap = a.softcap;
  check_flag("alibi_sqrt", a.alibi_sqrt);
  if (present(a.alibi_slopes)) {
    check_tensor("alibi_slopes", a.alibi_slopes, {ATTUNE_FLOAT32}, {1, 2}, data);
    p.alibi_per_batch = a.alibi_slopes.rank == 2;
    if (p.alibi_per_batch) check_extent("alibi_slopes", a.alibi_slopes, 0, p.batch, "batch");
    check_extent("alibi_slopes", a.alibi_slopes, a.alibi_slopes.rank - 1, p.heads_q, "num_heads_q");
    p.alibi = param_view(a.alibi_slopes);
    p.alibi_sqrt = a.alibi_sqrt == 1;
  } else {
    require(a.alibi_sqrt == 0, "alibi_sqrt is 1, but alibi_slopes is absent");
  }
  if (present(a.bias)) {
    check_tensor("bias", a.bias, kFloats, {3}, data);
    require(a.bias.shape[0] == 1 || a.bias.shape[0] == p.heads_q, "bias.shape[0] is ", a.bias.shape[0],
            "; it must be 1 or ", p.heads_q, " (num_heads_q)");
    // attune_validate checks lengths in tables: here they may be on a device.
    if (p.dense_kv && !p.cu_kv && !p.seqused && p.total_q > 0) {
      for (const int axis : {1, 2})
        require(a.bias.shape[axis] >= p.fixed_kv, "bias.shape[", axis, "] is ", a.bias.shape[axis],
                "; it must be at least ", p.fixed_kv, " (seqlen_kv)");
    }
    p.bias = param_view(a.bias);
  }
  if (present(a.new_token_bias)) {
    check_tensor("new_token_bias", a.new_token_bias, kFloats, {2}, data);
    p.new_token_bias = param_view(a.new_token_bias);
  }
  if (present(a.t5_bias)) {
    check_tensor("t5_bias", a.t5_bias, kFloats, {2}, data);
    check_extent("t5_bias", a.t5_bias, 0, p.heads_q, "num_heads_q");
    check_flag("t5_bidirectional", a.t5_bidirectional);
    p.t5_bias = param_view(a.t5_bias);
    p.t5_num_buckets = a.t5_bias.shape[1];
    p.t5_max_distance = a.t5_max_distance;
    p.t5_bidirectional = a.t5_bidirectional == 1;
    const int64_t least = p.t5_bidirectional ? 4 : 2;
    require(p.t5_num_buckets >= least && p.t5_num_buckets <= (1 << 20), "t5_bias.shape[1] is ", p.t5_num_buckets,
            "; num_buckets must be ", least, "..", 1 << 20);
    const int64_t exact = p.t5_num_buckets / (p.t5_bidirectional ? 4 : 2);
    require(a.t5_max_distance > exact && a.t5_max_distance <= (1 << 20), "t5_max_distance is ", a.t5_max_distance,
            "; it must be ", exact + 1, "..", 1 << 20, " (more than the exact buckets)");
  } else {
    require(a.t5_max_distance == 0 && a.t5_bidirectional == 0,
            "t5_max_distance or t5_bidirectional is set, but t5_bias is absent");
  }
  if (present(a.sinks)) {
    check_tensor("sinks", a.sinks, kFloats, {1}, data);
    check_extent("sinks", a.sinks, 0, p.heads_q, "num_heads_q");
    p.sinks = param_view(a.sinks);
  }
}

void read_prologue(Problem& p, const attune_attention& a, Data data) {
  PrologueShapes s{};
  s.batch = p.batch;
  s.total_q = p.total_q;
  s.heads_q = p.heads_q;
  s.heads_kv = p.heads_kv;
  s.head_dim_qk = p.head_dim_qk;
  s.head_dim_v = p.head_dim_v;
  s.has_q = true;
  s.has_k = static_cast<bool>(p.k);
  s.has_v = p.k && !p.v_aliases_k;
  s.q_dtype = p.q.dtype;
  s.k_dtype = p.k.dtype;
  s.v_dtype = s.has_v ? p.v.dtype : static_cast<int32_t>(ATTUNE_DTYPE_NONE);
  s.same_tokens =
      p.new_tokens || (p.dense_kv && p.k.rows == p.total_q && p.fixed_kv == p.fixed_q && p.cu_kv.data == p.cu_q.data);
  p.prologue = make_prologue(a.prologue, s, data);
  require(!p.q_rope || !(p.prologue.any || p.prologue.append),
          "q_rope is set beside a prologue, which works on whole rows of q; give whole rows, or no prologue");
  require(!p.prologue.append || p.new_tokens,
          "prologue.append is 1, but there is no cache with new tokens (cache.k and k)");
  check_scales(p.prologue, p.cache);
  if (p.sparse && p.cache) {
    require(!p.prologue.has_rope() || p.prologue.has_positions,
            "prologue.rope_cos_sin is set without prologue.positions, but indices name slots, which say nothing of "
            "where queries stand");
    require(!p.prologue.logn, "prologue.logn is set, but indices name slots, which say nothing of where queries stand");
  }
}

RowView read_row_output(const char* name, const attune_tensor& t, const attune_attention& a, Data data) {
  if (!present(t)) return {};
  check_tensor(name, t, {ATTUNE_FLOAT32}, {a.q.rank - 1}, data);
  for (int i = 0; i + 1 < a.q.rank; ++i) check_extent(name, t, i, a.q.shape[i], "as q without its last axis");
  check_no_overlap(name, t);
  return row_view(t, false);
}

void read_outputs(Problem& p, const attune_attention& a, Data data) {
  check_tensor("out", a.out, {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16, ATTUNE_FLOAT8_E4M3}, {a.q.rank}, data);
  for (int i = 0; i + 1 < a.q.rank; ++i) check_extent("out", a.out, i, a.q.shape[i], "as q");
  check_extent("out", a.out, a.out.rank - 1, p.head_dim_v, "head_dim_v");
  check_no_overlap("out", a.out);
  p.out = row_view(a.out);
  p.out_scale = read_out_scale(a.out, a.out_scale, data);
  p.lse = read_row_output("lse", a.lse, a, data);
  p.max_logits = read_row_output("max_logits", a.max_logits, a, data);
  require(a.max_seqlen_q >= 0, "max_seqlen_q is ", a.max_seqlen_q, "; it must be >= 0");
  require(a.max_seqlen_kv >= 0, "max_seqlen_kv is ", a.max_seqlen_kv, "; it must be >= 0");
  check_flag("batch_invariant", a.batch_invariant);
  check_flag("allow_tf32", a.allow_tf32);
  p.batch_invariant = a.batch_invariant == 1;
  p.allow_tf32 = a.allow_tf32 == 1;
}

// The maxima that kernels are chosen by: what shapes allow, or the caller's values where these are less. With
// batch_invariant, totals of the batch must not decide, so the caller's values are taken as they are.
void derive_maxima(Problem& p, const attune_attention& a) {
  constexpr int64_t kLongest = std::numeric_limits<int32_t>::max();
  const auto maximum = [&](int64_t given, int64_t possible, bool of_batch) {
    if (given == 0) return possible;
    return std::min(given, of_batch && p.batch_invariant ? kLongest : possible);
  };
  const int64_t q = p.cu_q ? p.total_q : p.fixed_q;
  p.max_seqlen_q = maximum(a.max_seqlen_q, q, static_cast<bool>(p.cu_q));
  if (p.sparse) {
    p.max_seqlen_kv = maximum(a.max_seqlen_kv, p.list.topk + p.extra_list.topk, false);
  } else if (p.dense_kv) {
    p.max_seqlen_kv = maximum(a.max_seqlen_kv, p.cu_kv ? p.k.rows : p.fixed_kv, static_cast<bool>(p.cu_kv));
  } else {
    p.max_seqlen_kv = maximum(a.max_seqlen_kv, p.cache.capacity() + (p.new_tokens ? q : 0), p.new_tokens && p.cu_q);
  }
}

}  // namespace

Problem make_problem(const attune_attention& a, Data data) {
  Problem p;
  read_queries(p, a, data);
  read_kv(p, a, data);
  read_beams(p, a, data);
  read_mask(p, a, data);
  read_score(p, a, data);
  read_prologue(p, a, data);
  read_outputs(p, a, data);
  derive_maxima(p, a);
  return p;
}

void make_sequences(const Problem& p, Sequence* out) {
  int64_t q_end = 0, kv_end = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence& s = out[b];
    s = {};
    if (p.cu_q) {
      // A running maximum: whatever the table says, sequences do not overlap.
      s.q_begin = std::clamp<int64_t>(p.cu_q(b), q_end, p.total_q);
      q_end = std::clamp<int64_t>(p.cu_q(b + 1), s.q_begin, p.total_q);
      s.num_q = q_end - s.q_begin;
    } else {
      s.q_begin = b * p.fixed_q;
      s.num_q = p.fixed_q;
    }
    if (p.dense_kv) {
      if (p.cu_kv) {
        s.kv_begin = std::clamp<int64_t>(p.cu_kv(b), kv_end, p.k.rows);
        kv_end = std::clamp<int64_t>(p.cu_kv(b + 1), s.kv_begin, p.k.rows);
        s.num_dense = kv_end - s.kv_begin;
      } else {
        s.kv_begin = b * p.fixed_kv;
        s.num_dense = p.fixed_kv;
      }
      if (p.seqused) s.num_dense = std::clamp<int64_t>(p.seqused(b), 0, s.num_dense);
    } else if (!p.sparse) {
      s.num_cached = std::max<int64_t>(p.seqused(b), 0);
      if (p.cache.ring_capacity == 0) s.num_cached = std::min(s.num_cached, p.cache.capacity());
      if (p.new_tokens) {
        s.kv_begin = s.q_begin;
        s.num_dense = s.num_q;
      }
    }
  }
}

}  // namespace attune
