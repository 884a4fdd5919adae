// SPDX-License-Identifier: Apache-2.0
#include "core/ops.h"

#include <algorithm>
#include <string>

#include "core/aliasing.h"
#include "core/dtype.h"
#include "core/problem.h"

namespace attune {
namespace {

constexpr std::initializer_list<int32_t> kOutputs = {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16,
                                                     ATTUNE_FLOAT8_E4M3};
void check_geometry(const char* name, int64_t heads, int64_t dim) {
  require(heads >= 1, name, " has ", heads, " heads; it must have at least 1");
  require(dim >= 1 && dim <= kMaxHeadDim, name, " has head_dim ", dim, "; it must be 1..", kMaxHeadDim);
}

FlagView flags(const char* name, const attune_tensor& t, int64_t batch) {
  if (!present(t)) return {};
  check_tensor(name, t, {ATTUNE_UINT8}, {1}, Data::kRequired);
  check_extent(name, t, 0, batch, "batch");
  return {static_cast<const uint8_t*>(t.data), t.stride[0]};
}

// The head_dim_v that make_kv_cache needs where V is part of K. These operations move whole rows: any number will do.
int64_t aliased_head_dim_v(const attune_kv_cache& c) { return present(c.v) || c.format != ATTUNE_KV_PLAIN ? 0 : 1; }

// --- qkv_prepare

struct NamedTensor {
  const char* name;
  const attune_tensor* tensor;
};

// Reads the sequences, as in attune_attention, from the first of q, k and v that is present.
void read_tokens(PrepareProblem& p, const attune_qkv_prepare& op, const NamedTensor& first) {
  const attune_tensor& t = *first.tensor;
  p.total = row_view(t).rows;
  if (t.rank == 4) {
    require(!present(op.cu_seqlens_q), "cu_seqlens_q is set, but ", first.name,
            " has rank 4, so each sequence has shape[1] tokens");
    p.batch = t.shape[0];
    p.fixed = t.shape[1];
  } else if (present(op.cu_seqlens_q)) {
    p.cu = int_vector("cu_seqlens_q", op.cu_seqlens_q, -1, "batch + 1", Data::kRequired);
    p.batch = p.cu.cols - 1;
  } else {
    const bool one_each = present(op.cache.k);
    p.batch = one_each ? p.total : 1;
    p.fixed = one_each ? 1 : p.total;
  }
}

// q, k or v: checked against the tokens of the first of them that is present.
RowView read_input(const NamedTensor& x, NamedTensor& first) {
  const attune_tensor& t = *x.tensor;
  if (!present(t)) return {};
  check_tensor(x.name, t, kInputs, {3, 4}, Data::kRequired);
  check_geometry(x.name, t.shape[t.rank - 2], t.shape[t.rank - 1]);
  if (first.tensor == nullptr) {
    first = x;
  } else {
    require(t.rank == first.tensor->rank, x.name, ".rank is ", t.rank, "; it must be ", first.tensor->rank, " as ",
            first.name);
    for (int i = 0; i + 2 < t.rank; ++i) check_extent(x.name, t, i, first.tensor->shape[i], Name("as ", first.name));
  }
  return row_view(t);
}

RowView read_output(const NamedTensor& out, const NamedTensor& in) {
  const attune_tensor& t = *out.tensor;
  if (!present(t)) return {};
  require(present(*in.tensor), out.name, " is set, but ", in.name, " is absent");
  check_tensor(out.name, t, kFloats, {in.tensor->rank}, Data::kRequired);
  for (int i = 0; i < t.rank; ++i) check_extent(out.name, t, i, in.tensor->shape[i], Name("as ", in.name));
  check_no_overlap(out.name, t);
  return row_view(t);
}

// --- cache operations

// Columns of a dense tensor of a cache operation must be those of the cache.
RowView read_dense(const char* name, const attune_tensor& t, int64_t tokens, const KvCache& cache, int64_t dim,
                   bool is_output) {
  check_tensor(name, t, kFloats, {3}, Data::kRequired);
  check_extent(name, t, 0, tokens, "tokens, as k");
  check_extent(name, t, 1, cache.num_heads, "num_heads_kv of the cache");
  check_extent(name, t, 2, dim, "head_dim of the cache");
  if (is_output) check_no_overlap(name, t);
  return row_view(t);
}

void read_slots(CacheProblem& out, const attune_cache_op& op) {
  check_tensor("slots", op.slots, {ATTUNE_INT64}, {1}, Data::kRequired);
  check_extent("slots", op.slots, 0, out.tokens, "tokens");
  out.slots = static_cast<const int64_t*>(op.slots.data);
  out.slot_stride = op.slots.stride[0];
}

void read_sequences(CacheProblem& out, const attune_cache_op& op) {
  check_tensor("seqused_kv", op.seqused_kv, {ATTUNE_INT32}, {1}, Data::kRequired);
  out.batch = op.seqused_kv.shape[0];
  out.seqused = int_view(op.seqused_kv);
  if (present(op.cu_seqlens)) {
    out.cu = int_vector("cu_seqlens", op.cu_seqlens, out.batch + 1, "batch + 1", Data::kRequired);
  } else {
    require(out.batch == 1 || out.batch == out.tokens,
            "cu_seqlens is absent, so k has one token for each sequence or there is one sequence, but ", "k has ",
            out.tokens, " token", plural_s(out.tokens), " and the batch (seqused_kv.shape[0]) is ", out.batch);
    out.fixed = out.batch == 1 ? out.tokens : 1;
  }
  out.finished = flags("finished", op.finished, out.batch);
}

const char* cache_op_name(int32_t kind) {
  constexpr const char* kNames[] = {"append", "quantize", "dequantize", "gather"};
  return kNames[kind];
}

}  // namespace

int64_t PrepareProblem::first_position(int64_t b) const {
  const int64_t used = seqused ? std::max<int64_t>(seqused(b), 0) : 0;
  return cache && cache.ring_capacity == 0 ? std::min(used, cache.capacity()) : used;
}

PrepareProblem make_qkv_prepare(const attune_qkv_prepare& op) {
  const NamedTensor in[3] = {{"q", &op.q}, {"k", &op.k}, {"v", &op.v}};
  const NamedTensor out[3] = {{"q_out", &op.q_out}, {"k_out", &op.k_out}, {"v_out", &op.v_out}};
  PrepareProblem p;
  NamedTensor first{nullptr, nullptr};
  p.q = read_input(in[0], first);
  p.k = read_input(in[1], first);
  p.v = read_input(in[2], first);
  require(first.tensor != nullptr, "q, k and v are all absent");
  read_tokens(p, op, first);
  auto axis = [](const attune_tensor& t, int from_last) { return t.shape[t.rank - from_last]; };
  if (p.q) p.heads_q = axis(op.q, 2), p.head_dim_qk = axis(op.q, 1);
  if (p.k) {
    require(!p.q || axis(op.k, 1) == p.head_dim_qk, "k has head_dim ", axis(op.k, 1), "; it must be ", p.head_dim_qk,
            " as q");
    p.heads_kv = axis(op.k, 2), p.head_dim_qk = axis(op.k, 1);
  }
  if (p.v) {
    require(!p.k || axis(op.v, 2) == p.heads_kv, "v has ", axis(op.v, 2), " head", plural_s(axis(op.v, 2)),
            "; it must have ", p.heads_kv, " as k");
    p.heads_kv = axis(op.v, 2), p.head_dim_v = axis(op.v, 1);
  }
  require(!p.q || p.heads_kv == 0 || p.heads_q % p.heads_kv == 0, "q has ", p.heads_q, " head", plural_s(p.heads_q),
          "; it must be a multiple of num_heads_kv (", p.heads_kv, ")");
  p.seqused = int_vector("seqused_kv", op.seqused_kv, p.batch, "batch", Data::kRequired);
  p.finished = flags("finished", op.finished, p.batch);
  const int64_t head_dim_v = present(op.cache.v) ? p.head_dim_v : aliased_head_dim_v(op.cache);
  p.cache = make_kv_cache("cache", op.cache, CacheUse::kSequences, p.batch, p.head_dim_qk, head_dim_v, Data::kRequired);
  const PrologueShapes s{p.batch,
                         p.total,
                         p.heads_q,
                         p.heads_kv,
                         p.head_dim_qk,
                         p.head_dim_v,
                         static_cast<bool>(p.q),
                         static_cast<bool>(p.k),
                         static_cast<bool>(p.v),
                         p.q.dtype,
                         p.k.dtype,
                         p.v.dtype,
                         true};
  p.prologue = make_prologue(op.prologue, s, Data::kRequired);
  p.q_out = read_output(out[0], in[0]);
  p.k_out = read_output(out[1], in[1]);
  p.v_out = read_output(out[2], in[2]);
  if (p.prologue.append) {
    require(static_cast<bool>(p.cache), "prologue.append is 1, but cache.k is absent");
    require(static_cast<bool>(p.k), "prologue.append is 1, but k is absent");
    require(p.cache.v_aliases_k == !p.v,
            "v and cache.v must be both present or both absent (V part of K) for prologue.append");
    require(p.cache.num_heads == p.heads_kv, "cache has ", p.cache.num_heads, " KV heads, but k has ", p.heads_kv);
    check_scales(p.prologue, p.cache);
  }
  check_apart(op, p.prologue.append ? &p.cache : nullptr);
  return p;
}

MergeProblem make_merge(const attune_merge& op) {
  constexpr Data kData = Data::kRequired;
  MergeProblem m;
  // The tensor of part 0.
  auto first_part = [](const attune_tensor& t) {
    attune_tensor part = t;
    part.rank = t.rank - 1;
    for (int i = 0; i < part.rank; ++i) part.shape[i] = t.shape[i + 1], part.stride[i] = t.stride[i + 1];
    return part;
  };
  auto part_bytes = [](const attune_tensor& t) { return t.shape[0] > 1 ? t.stride[0] * dtype_size(t.dtype) : 0; };

  check_tensor("partial_out", op.partial_out, kFloats, {4}, kData);
  m.parts = op.partial_out.shape[0];
  m.rows = op.partial_out.shape[1];
  m.heads = op.partial_out.shape[2];
  m.head_dim_v = op.partial_out.shape[3];
  check_tensor("partial_lse", op.partial_lse, {ATTUNE_FLOAT32}, {3}, kData);
  for (int i = 0; i < 3; ++i) check_extent("partial_lse", op.partial_lse, i, op.partial_out.shape[i], "as partial_out");
  check_tensor("out", op.out, kOutputs, {3}, kData);
  for (int i = 0; i < 3; ++i) check_extent("out", op.out, i, op.partial_out.shape[i + 1], "as partial_out");
  check_no_overlap("out", op.out);
  m.partial_out = row_view(first_part(op.partial_out));
  m.partial_lse = row_view(first_part(op.partial_lse), false);
  m.out_part_bytes = part_bytes(op.partial_out);
  m.lse_part_bytes = part_bytes(op.partial_lse);
  m.out = row_view(op.out);
  if (present(op.sinks)) {
    check_tensor("sinks", op.sinks, kFloats, {1}, kData);
    check_extent("sinks", op.sinks, 0, m.heads, "heads");
    m.sinks = param_view(op.sinks);
  }
  m.out_scale = read_out_scale(op.out, op.out_scale, kData);
  if (present(op.lse)) {
    check_tensor("lse", op.lse, {ATTUNE_FLOAT32}, {2}, kData);
    check_extent("lse", op.lse, 0, m.rows, "rows, as partial_out");
    check_extent("lse", op.lse, 1, m.heads, "heads, as partial_out");
    check_no_overlap("lse", op.lse);
    m.lse = row_view(op.lse, false);
  }
  check_apart(op);
  return m;
}

CacheProblem make_cache_op(const attune_cache_op& op) {
  require(op.kind >= ATTUNE_CACHE_APPEND && op.kind <= ATTUNE_CACHE_GATHER, "kind is ", op.kind,
          "; it must be one of attune_cache_op_kind (0..3)");
  CacheProblem out;
  out.kind = op.kind;
  const bool reads_cache = op.kind == ATTUNE_CACHE_DEQUANTIZE || op.kind == ATTUNE_CACHE_GATHER;
  const bool whole = op.kind == ATTUNE_CACHE_QUANTIZE || op.kind == ATTUNE_CACHE_DEQUANTIZE;
  out.by_slots = whole || present(op.slots);
  check_tensor("k", op.k, kFloats, {3}, Data::kRequired);
  check_geometry("k", op.k.shape[1], op.k.shape[2]);
  out.tokens = op.k.shape[0];
  if (!out.by_slots) {
    require(present(op.seqused_kv), "slots and seqused_kv are both absent; ", cache_op_name(op.kind),
            " needs one of them");
    read_sequences(out, op);
  } else {
    const char* absent =
        whole ? " must be absent: slot i is token i" : " must be absent: slots says where the tokens are";
    require(!whole || !present(op.slots), "slots", absent);
    require(!present(op.seqused_kv), "seqused_kv", absent);
    require(!present(op.cu_seqlens), "cu_seqlens", absent);
    require(!present(op.finished), "finished", absent);
    if (!whole) read_slots(out, op);
  }
  require(op.kind == ATTUNE_CACHE_APPEND || !present(op.finished), "finished is set; only append reads it");
  const CacheUse use = out.by_slots ? CacheUse::kSlots : CacheUse::kSequences;
  require(present(op.cache.k), "cache.k is absent");
  out.cache = make_kv_cache("cache", op.cache, use, out.by_slots ? -1 : out.batch, op.k.shape[2],
                            aliased_head_dim_v(op.cache), Data::kRequired);
  out.k = read_dense("k", op.k, out.tokens, out.cache, out.cache.head_dim_qk, reads_cache);
  if (present(op.v)) {
    require(!out.cache.v_aliases_k, "v is set, but V is part of K in the cache");
    check_geometry("cache.v", out.cache.num_heads, out.cache.head_dim_v);
    out.v = read_dense("v", op.v, out.tokens, out.cache, out.cache.head_dim_v, reads_cache);
  } else {
    require(out.cache.v_aliases_k, "v is absent, but the cache has cache.v");
  }
  require(!whole || out.tokens <= out.cache.num_slots(), "k has ", out.tokens, " token", plural_s(out.tokens),
          ", but the cache has ", out.cache.num_slots(), " slot", plural_s(out.cache.num_slots()));
  require(op.power_of_two_scales == 0 || op.power_of_two_scales == 1, "power_of_two_scales is ", op.power_of_two_scales,
          "; it must be 0 or 1");
  require(op.power_of_two_scales == 0 || out.cache.writes_scales(),
          "power_of_two_scales is 1, but the cache is plain without scales per token and head: no scale is written");
  out.power_of_two_scales = op.power_of_two_scales == 1;
  check_apart(op, out.cache);
  return out;
}

}  // namespace attune
