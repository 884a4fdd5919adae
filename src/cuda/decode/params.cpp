// SPDX-License-Identifier: Apache-2.0
// From a problem to the kernels' flat parameters.
#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>

#include "common/work_tile_params.h"
#include "core/integers.h"
#include "core/schedule_stamp.h"
#include "cuda/decode/config.h"
#include "cuda/ops/params.h"

namespace attune::cuda::decode {

kernels::IntTable int_table(const IntView& v) {
  return v ? kernels::IntTable{v.data, static_cast<long long>(v.row_stride), static_cast<long long>(v.col_stride)}
           : kernels::IntTable{nullptr, 0, 0};
}

kernels::KvPlane to_plane(const KvPlane& v, bool own_table) {
  const int64_t size = v.element_size;
  kernels::KvPlane k{};
  k.data = reinterpret_cast<const char*>(v.data);
  k.page_stride = v.page_stride * size;
  k.slot_stride = v.slot_stride * size;
  k.head_stride = v.head_stride * size;
  k.outer_stride = v.outer_stride;
  k.inner_stride = v.inner_stride;
  k.pack = static_cast<int>(v.pack);
  k.contiguous = v.contiguous ? 1 : 0;
  k.table_is_own = own_table ? 1 : 0;
  return k;
}

namespace {

using kernels::AttentionParams;

struct RowStrides {
  long long batch, row, head;
};
RowStrides row_strides(const Problem& p, const RowView& v) {
  const int64_t batch = v.rows_per_batch == 0 ? p.fixed_q * v.row_stride : v.batch_stride;
  return {static_cast<long long>(batch), static_cast<long long>(v.row_stride), static_cast<long long>(v.head_stride)};
}

kernels::KvScale to_scale(const KvScale& s) {
  return {s.data, static_cast<long long>(s.page_stride), static_cast<long long>(s.slot_stride),
          static_cast<long long>(s.head_stride), static_cast<int>(s.mode)};
}

void fill_rows(const Problem& p, AttentionParams& k) {
  const RowStrides q = row_strides(p, p.q), out = row_strides(p, p.out), lse = row_strides(p, p.lse),
                   max = row_strides(p, p.max_logits);
  k.q = reinterpret_cast<const char*>(p.q.data);
  k.q_batch_stride = q.batch, k.q_row_stride = q.row, k.q_head_stride = q.head;
  k.q_dim_stride = p.q.dim_stride;
  k.out = reinterpret_cast<char*>(p.out.data);
  k.out_batch_stride = out.batch, k.out_row_stride = out.row, k.out_head_stride = out.head;
  k.out_dim_stride = p.out.dim_stride;
  k.lse = p.lse ? reinterpret_cast<float*>(p.lse.data) : nullptr;
  k.lse_batch_stride = lse.batch, k.lse_row_stride = lse.row, k.lse_head_stride = lse.head;
  k.max_logits = p.max_logits ? reinterpret_cast<float*>(p.max_logits.data) : nullptr;
  k.max_batch_stride = max.batch, k.max_row_stride = max.row, k.max_head_stride = max.head;
  k.cu_seqlens_q = int_table(p.cu_q);
  k.total_q = p.total_q;
  k.fixed_q = to_int(p.fixed_q);
}

kernels::NewRows new_rows(const Problem& p, const RowView& v) {
  const RowStrides strides = row_strides(p, v);
  return {reinterpret_cast<const char*>(v.data), strides.batch, strides.row, strides.head, v.dim_stride};
}

void fill_new_tokens(const Problem& p, AttentionParams& k) {
  if (p.new_tokens) {
    k.new_k = new_rows(p, p.k);
    k.new_v = new_rows(p, p.v);
  }
  k.v_is_k = p.v_aliases_k ? 1 : 0;
  k.prologue = ops::prologue_params(p.prologue);
  k.append = p.prologue.append ? 1 : 0;
}

void fill_cache(const Problem& p, AttentionParams& k) {
  const KvCache& c = p.cache;
  k.k = to_plane(c.k, false);
  k.v = to_plane(c.v, c.paged && static_cast<bool>(c.v_page_table));
  k.k_scale = to_scale(c.k_scale);
  k.v_scale = to_scale(c.v_scale);
  k.page_table = int_table(c.page_table);
  k.v_page_table = int_table(c.v_page_table);
  k.batch_index = int_table(c.batch_index);
  k.num_pages = std::min<int64_t>(c.num_pages, std::numeric_limits<int32_t>::max());  // ids are int32
  k.page_size = to_int(c.page_size);
  k.page_shift = std::has_single_bit(static_cast<uint64_t>(c.page_size))
                     ? std::countr_zero(static_cast<uint64_t>(c.page_size))
                     : -1;
  k.capacity = to_int(c.capacity());
  k.ring_capacity = to_int(c.ring_capacity);
  k.paged = c.paged ? 1 : 0;
  k.cache_indirection = int_table(p.cache_indirection);
  k.beam_prompt_length = int_table(p.beam_prompt_length);
  k.beam_width = to_int(std::max<int64_t>(1, p.beam_width));
  k.beam_columns = to_int(p.cache_indirection.cols);
}

kernels::BiasTable bias_table(const ParamView& v) {
  if (!v) return {};
  return {reinterpret_cast<const char*>(v.data),
          v.shape[0] == 1 ? 0 : static_cast<long long>(v.stride[0]),
          static_cast<long long>(v.stride[1]),
          static_cast<long long>(v.stride[2]),
          to_int(v.shape[1]),
          to_int(v.shape[2]),
          v.dtype};
}

void fill_tables(const Problem& p, const kernels::T5Table& t5, AttentionParams& k) {
  k.bias = bias_table(p.bias);
  k.new_token_bias = bias_table(p.new_token_bias);
  k.t5 = t5;
  if (p.t5_bias) {
    k.t5.data = reinterpret_cast<const char*>(p.t5_bias.data);
    k.t5.head_stride = p.t5_bias.stride[1];
    k.t5.bucket_stride = p.t5_bias.stride[2];
    k.t5.dtype = p.t5_bias.dtype;
  }
  k.mask_bits = p.mask_bits;
  k.mask_row_stride = p.mask_row_stride;
  k.mask_head_stride = p.mask_head_stride;
  k.mask_byte_stride = p.mask_byte_stride;
  k.mask_columns = to_int(p.mask_columns);
  k.mask_start = int_table(p.mask_start);
  k.ranges = p.ranges;
  k.num_ranges = to_int(p.num_ranges);
  k.range_batch_stride = p.range_batch_stride;
  k.range_stride = p.range_stride;
  k.range_end_stride = p.range_end_stride;
}

void fill_scores(const Problem& p, AttentionParams& k) {
  k.scale = p.scale;
  if (p.softcap > 0) {
    k.cap_inverse = static_cast<float>(1.0 / p.softcap);
    k.cap_level = static_cast<float>(p.softcap * std::numbers::log2e);
  }
  if (p.alibi) {
    constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
    k.alibi = reinterpret_cast<const float*>(p.alibi.data);
    k.alibi_batch_stride = p.alibi_per_batch ? p.alibi.stride[1] / kFloat : 0;
    k.alibi_head_stride = p.alibi.stride[2] / kFloat;
  }
  if (p.sinks) {
    k.sinks = reinterpret_cast<const char*>(p.sinks.data);
    k.sinks_stride = p.sinks.stride[2];
    k.sinks_dtype = p.sinks.dtype;
  }
  k.out_scale = p.out_scale;
  k.causal = p.causal ? 1 : 0;
  constexpr int64_t kWidest = std::numeric_limits<int32_t>::max();  // no position is larger
  k.window_left = std::min(p.window_left, kWidest);
  k.window_right = std::min(p.window_right, kWidest);
  k.finished = p.finished;
  k.finished_stride = p.finished_stride;
  k.skip_decode = p.skip_decode ? 1 : 0;
  k.zero_finished = p.zero_finished ? 1 : 0;
}

void fill_sizes(const Problem& p, AttentionParams& k) {
  k.batch = to_int(p.batch);
  k.num_heads_q = to_int(p.heads_q);
  k.num_heads_kv = to_int(p.heads_kv);
  k.group = to_int(p.group);
  k.by_group = kernels::make_divisor(static_cast<unsigned>(std::max(1, k.group)));
  k.whole_pairs = p.batch_invariant ? 1 : 0;
}

// What else a schedule may be of follows from its plan: causality, skip_decode, heads.
unsigned stamp_of_call(const Problem& p) {
  Stamp stamp = stamp_of_shapes(p);
  const bool may_skip = p.finished != nullptr || p.skip_decode;
  stamp.add(may_skip && p.zero_finished ? 1 : 0);
  return static_cast<unsigned>(stamp.value());
}

// A tile of 128 keys takes a multiprocessor so much longer with 128 rows of a prompt than with those of a block here.
constexpr float kPromptTile = 1.22f;

void fill_schedule(const Problem& p, const Config& c, AttentionParams& k) {
  k.blocks = c.blocks / c.head_lanes;
  k.head_lanes = c.head_lanes;
  k.few_q = c.beside.few_q;
  k.prompt_tile = kPromptTile * c.beside.tile * 128 / static_cast<float>(c.warps * kernels::kKeysOfWarp);
  k.row_blocks = to_int((std::max<int64_t>(1, p.max_seqlen_q) * p.group + c.rows() - 1) / c.rows());
}

}  // namespace

void fill_problem(const Problem& p, const kernels::T5Table& t5, AttentionParams& k) {
  fill_sizes(p, k);
  fill_rows(p, k);
  if (p.cache) fill_cache(p, k);
  fill_scores(p, k);
  fill_tables(p, t5, k);
  k.seqused_kv = int_table(p.seqused);
  k.stamped_kv = int_table(p.cu_kv);
  k.stamp_of_call = stamp_of_call(p);
  k.checks_stamp = p.scheduled_before ? 1 : 0;
}

AttentionParams to_params(const Problem& p, const Config& c, void* workspace) {
  AttentionParams k{};
  fill_problem(p, c.t5, k);
  fill_new_tokens(p, k);
  fill_schedule(p, c, k);
  const WorkspaceLayout w = workspace_layout(c);
  char* base = static_cast<char*>(workspace);
  k.stream_k = reinterpret_cast<kernels::StreamKRange*>(base + w.stream_k);
  k.arrivals = reinterpret_cast<unsigned*>(base + w.arrivals);
  if (c.beside.list_at != 0) {
    auto& list = *reinterpret_cast<kernels::WorkList*>(base + c.beside.list_at);
    k.prompt_tiles = &list.num_tiles, k.few_begun = &list.few_begun;
  }
  if (c.append_counters > 0) k.tiles_done = reinterpret_cast<unsigned*>(base + w.tiles_done);
  k.partial_stats = reinterpret_cast<float*>(base + w.stats);
  k.partial_out = reinterpret_cast<float*>(base + w.out);
  return k;
}

}  // namespace attune::cuda::decode
