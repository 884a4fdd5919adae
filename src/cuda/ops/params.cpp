// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/params.h"

#include <algorithm>
#include <limits>

#include "core/dtype.h"
#include "core/integers.h"

namespace attune::cuda::ops {
namespace {

constexpr int64_t kRun = 8;  // channels that a thread moves at a time

template <class... Strides>
bool divides(int64_t unit, Strides... strides) {
  return ((strides % unit == 0) && ...);
}

bool aligned(const void* data, int64_t unit) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(unit) == 0;
}

// A run of 8 channels is moved by vectors of so many bytes: one, or two for fp32.
int64_t vector_bytes(int64_t element_size) { return std::min<int64_t>(16, kRun * element_size); }

bool has_vectors(const KvPlane& p, int64_t channels) {
  const int64_t unit = vector_bytes(p.element_size), size = p.element_size;
  if (channels % kRun != 0 || !p.contiguous) return false;
  return aligned(p.data, unit) && divides(unit, p.page_stride * size, p.slot_stride * size, p.head_stride * size);
}

char* bytes(const void* data) { return const_cast<char*>(static_cast<const char*>(data)); }

// The tokens of an operation, by sequences.
template <class Op>
kernels::RowTokens sequence_tokens(const Op& op, int64_t total) {
  kernels::RowTokens t{};
  t.total = total;
  t.batch = to_int(op.batch);
  t.fixed = op.fixed;
  t.cu_seqlens = int_table(op.cu);
  t.seqused = int_table(op.seqused);
  t.finished = op.finished.data, t.finished_stride = op.finished.stride;
  return t;
}

kernels::RowTokens cache_tokens(const CacheProblem& op) {
  kernels::RowTokens t = sequence_tokens(op, op.tokens);
  t.by_slots = op.by_slots ? 1 : 0;
  static_assert(sizeof(long long) == sizeof(int64_t));
  t.slots = reinterpret_cast<const long long*>(op.slots);
  t.slot_stride = op.slot_stride;
  return t;
}

}  // namespace

kernels::KvPlane kv_plane(const KvPlane& p) {
  const int64_t size = p.element_size;
  kernels::KvPlane k{};
  k.data = bytes(p.data);
  k.page_stride = p.page_stride * size;
  k.slot_stride = p.slot_stride * size;
  k.head_stride = p.head_stride * size;
  k.pack = p.contiguous ? std::numeric_limits<int>::max() : to_int(p.pack);
  k.outer_stride = p.outer_stride;
  k.inner_stride = p.inner_stride;
  k.contiguous = p.contiguous ? 1 : 0;
  k.dtype = p.dtype;
  return k;
}

kernels::IntTable int_table(const IntView& v) {
  return v ? kernels::IntTable{v.data, v.row_stride, v.col_stride} : kernels::IntTable{nullptr, 0, 0};
}

kernels::FloatTable float_table(const ParamView& v) {
  if (!v) return {};
  const int64_t size = dtype_size(v.dtype);
  const bool vector = v.stride[2] == size && v.shape[2] % kRun == 0 && aligned(v.data, vector_bytes(size)) &&
                      divides(vector_bytes(size), v.stride[0], v.stride[1]);
  return {bytes(v.data), v.stride[0], v.stride[1], v.stride[2], v.dtype, vector ? 1 : 0};
}

kernels::PrologueParams prologue_params(const Prologue& p) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(float));
  kernels::PrologueParams k{};
  k.qkv_scale = p.qkv_scale;
  k.qkv_scale_stride = p.qkv_scale_stride;
  k.q_bias = float_table(p.q_bias), k.k_bias = float_table(p.k_bias), k.v_bias = float_table(p.v_bias);
  k.ia3_k = float_table(p.ia3_k), k.ia3_v = float_table(p.ia3_v);
  k.ia3_task = int_table(p.ia3_task);
  k.num_tasks = p.ia3_k ? p.ia3_k.shape[0] : p.ia3_v ? p.ia3_v.shape[0] : 0;
  k.cos_sin = p.cos_sin;
  k.table_stride = p.table_stride, k.position_stride = p.position_stride, k.channel_stride = p.channel_stride;
  k.num_tables = p.num_tables, k.num_positions = p.num_positions;
  k.rotary_dim = to_int(p.rotary_dim), k.rope_offset = to_int(p.rope_offset);
  k.interleaved = p.interleaved ? 1 : 0;
  k.cos_sin_vector = p.channel_stride == 1 && p.rotary_dim % (2 * kRun) == 0 && aligned(p.cos_sin, 16) &&
                             divides(16, p.table_stride * kSize, p.position_stride * kSize)
                         ? 1
                         : 0;
  k.rope_table_index = int_table(p.rope_table_index);
  if (p.has_positions) k.positions = {p.positions.data, p.positions.row_stride, p.positions.col_stride};
  k.components = to_int(p.positions.cols);
  k.mrope_interleaved = p.mrope_interleaved ? 1 : 0;
  for (int i = 0; i < 3; ++i) k.mrope_section[i] = p.mrope_section[i];
  if (p.logn) {
    k.logn = reinterpret_cast<const float*>(p.logn.data);
    k.logn_stride = p.logn.stride[2] / kSize;
    k.logn_length = p.logn_length;
  }
  return k;
}

kernels::RowTensor row_tensor(const RowView& v) {
  if (!v) return {};
  const int64_t size = v.element_size;
  return {bytes(v.data),        v.batch_stride * size, v.row_stride * size,
          v.head_stride * size, v.dim_stride * size,   v.dtype};
}

kernels::RowCache row_cache(const KvCache& c) {
  kernels::RowCache k{};
  if (!c) return k;
  k.k = kv_plane(c.k);
  k.v = kv_plane(c.v);
  k.k_scale = c.k_scale;
  k.v_scale = c.v_scale;
  k.page_table = int_table(c.page_table);
  k.v_page_table = int_table(c.v_page_table);
  k.batch_index = int_table(c.batch_index);
  k.num_pages = c.num_pages;
  k.page_size = c.page_size;
  k.capacity = c.capacity();
  k.ring_capacity = c.ring_capacity;
  k.paged = c.paged ? 1 : 0;
  return k;
}

kernels::StoreParams store_params(const PrepareProblem& op) {
  kernels::StoreParams k{};
  k.tokens = sequence_tokens(op, op.total);
  const RowView& first = op.q ? op.q : op.k ? op.k : op.v;
  k.tokens.rows_per_outer = first.rows_per_batch;
  k.tokens.clamp_used = op.cache && op.cache.ring_capacity == 0 ? 1 : 0;
  const RowView* in[3] = {&op.q, &op.k, &op.v};
  const RowView* out[3] = {&op.q_out, &op.k_out, &op.v_out};
  for (int i = 0; i < 3; ++i) k.in[i] = row_tensor(*in[i]), k.out[i] = row_tensor(*out[i]);
  k.append = op.prologue.append ? 1 : 0;
  k.heads_q = op.q_out ? to_int(op.heads_q) : 0;
  k.has_v = op.v && (op.v_out || k.append) ? 1 : 0;
  k.heads_kv = op.k_out || op.v_out || k.append ? to_int(op.heads_kv) : 0;
  k.head_dim_qk = to_int(op.head_dim_qk);
  k.head_dim_v = to_int(op.head_dim_v);
  k.cache = row_cache(op.cache);
  k.cache.power_of_two_scales = op.prologue.power_of_two_scales ? 1 : 0;
  k.prologue = prologue_params(op.prologue);
  return k;
}

kernels::StoreParams store_params(const CacheProblem& op) {
  kernels::StoreParams k{};
  k.tokens = cache_tokens(op);
  k.in[1] = row_tensor(op.k);
  k.in[2] = row_tensor(op.v);
  k.append = 1;
  k.has_v = op.v ? 1 : 0;
  k.heads_kv = to_int(op.cache.num_heads);
  k.head_dim_qk = to_int(op.cache.head_dim_qk);
  k.head_dim_v = to_int(op.cache.head_dim_v);
  k.cache = row_cache(op.cache);
  k.cache.power_of_two_scales = op.power_of_two_scales ? 1 : 0;
  return k;
}

kernels::FetchParams fetch_params(const CacheProblem& op) {
  kernels::FetchParams k{};
  k.tokens = cache_tokens(op);
  k.k = row_tensor(op.k);
  k.v = row_tensor(op.v);
  k.heads = to_int(op.cache.num_heads);
  k.head_dim_qk = to_int(op.cache.head_dim_qk);
  k.head_dim_v = to_int(op.cache.head_dim_v);
  k.cache = row_cache(op.cache);
  return k;
}

kernels::MergeParams merge_params(const MergeProblem& op) {
  kernels::MergeParams k{};
  k.rows = op.rows;
  k.parts = op.parts;
  k.heads = to_int(op.heads);
  k.head_dim = to_int(op.head_dim_v);
  k.in = row_tensor(op.partial_out);
  k.in_part_stride = op.out_part_bytes;
  const kernels::RowTensor in_lse = row_tensor(op.partial_lse), lse = row_tensor(op.lse);
  k.in_lse = in_lse.data;
  k.in_lse_part_stride = op.lse_part_bytes;
  k.in_lse_row_stride = in_lse.row_stride;
  k.in_lse_head_stride = in_lse.head_stride;
  k.out = row_tensor(op.out);
  k.lse = lse.data;
  k.lse_row_stride = lse.row_stride;
  k.lse_head_stride = lse.head_stride;
  if (op.sinks) {
    k.sinks = bytes(op.sinks.data);
    k.sinks_stride = op.sinks.stride[2];
    k.sinks_dtype = op.sinks.dtype;
  }
  k.out_scale = op.out_scale;
  return k;
}

bool has_vectors(const RowView& v, int64_t channels) {
  if (!v) return true;
  const int64_t size = v.element_size, unit = vector_bytes(size);
  return channels % kRun == 0 && v.dim_stride == 1 && aligned(v.data, unit) &&
         divides(unit, v.batch_stride * size, v.row_stride * size, v.head_stride * size);
}

bool has_vectors(const KvCache& c) {
  if (!c) return true;
  if (!c.format->plain) return aligned(c.k.data, 16) && divides(16, c.k.page_stride, c.k.slot_stride);
  return has_vectors(c.k, c.head_dim_qk) && (c.v_aliases_k || has_vectors(c.v, c.head_dim_v));
}

}  // namespace attune::cuda::ops
