// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/params.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>

#include "core/integers.h"
#include "core/schedule_stamp.h"
#include "core/tables.h"
#include "cuda/ops/params.h"

namespace attune::cuda::attention {

namespace {

using kernels::AttentionParams;

int64_t t5_direction_buckets(const Problem& p) { return p.t5_bidirectional ? p.t5_num_buckets / 2 : p.t5_num_buckets; }

}  // namespace

RowStrides row_strides(const Problem& p, const RowView& v) {
  const int64_t batch = v.rows_per_batch == 0 ? p.fixed_q * v.row_stride : v.batch_stride;
  return {static_cast<long long>(batch), static_cast<long long>(v.row_stride), static_cast<long long>(v.head_stride)};
}

namespace {

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
  k.cu_seqlens_q = ops::int_table(p.cu_q);
  k.total_q = p.total_q;
  k.fixed_q = to_int(p.fixed_q);
}

void fill_cache(const Problem& p, AttentionParams& k) {
  const KvCache& c = p.cache;
  k.k = ops::kv_plane(c.k);
  k.v = ops::kv_plane(c.v);
  k.v.has_v_page_table = c.paged && c.v_page_table ? 1 : 0;
  k.k_scale = c.k_scale;
  k.v_scale = c.v_scale;
  k.page_table = ops::int_table(c.page_table);
  k.v_page_table = ops::int_table(c.v_page_table);
  k.batch_index = ops::int_table(c.batch_index);
  k.num_pages = std::min<int64_t>(c.num_pages, std::numeric_limits<int32_t>::max());  // ids are int32
  k.page_size = to_int(c.page_size);
  k.page_shift = std::has_single_bit(static_cast<uint64_t>(c.page_size))
                     ? std::countr_zero(static_cast<uint64_t>(c.page_size))
                     : -1;
  k.capacity = to_int(c.capacity());
  k.ring_capacity = to_int(c.ring_capacity);
  k.paged = c.paged ? 1 : 0;
  k.cache_indirection = ops::int_table(p.cache_indirection);
  k.beam_prompt_length = ops::int_table(p.beam_prompt_length);
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
  k.key_masks = p.key_masks;
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
  k.no_splits = p.batch_invariant ? 1 : 0;
}

// The stamp leaves out what cannot differ between the runs of a plan: causality, skip_decode, heads.
unsigned stamp_of_call(const Problem& p) {
  Stamp stamp = stamp_of_shapes(p);
  const bool may_skip = p.finished != nullptr || p.skip_decode;
  stamp.add(may_skip && p.zero_finished ? 1 : 0);
  return static_cast<unsigned>(stamp.value());
}

}  // namespace

kernels::NewRows new_rows(const Problem& p, const RowView& v) {
  const RowStrides strides = row_strides(p, v);
  return {reinterpret_cast<const char*>(v.data), strides.batch, strides.row, strides.head, v.dim_stride};
}

kernels::NewRows dense_rows(const RowView& v) {
  return {reinterpret_cast<const char*>(v.data), v.rows_per_batch > 0 ? v.batch_stride : 0, v.row_stride, v.head_stride,
          v.dim_stride};
}

void fill_problem(const Problem& p, const kernels::T5Table& t5, AttentionParams& k) {
  fill_sizes(p, k);
  fill_rows(p, k);
  if (p.cache) fill_cache(p, k);
  fill_scores(p, k);
  fill_tables(p, t5, k);
  k.seqused_kv = ops::int_table(p.seqused);
  k.stamped_kv = ops::int_table(p.cu_kv);
  k.stamp_of_call = stamp_of_call(p);
  k.checks_stamp = p.scheduled_before ? 1 : 0;
}

Coverage coverage() {
  Coverage c;
  c[Axis::kQueries] = use::kRagged | use::kFixed;
  c[Axis::kKvScales] = use::kCodecScales;
  c[Axis::kKvLayout] = use::kNhd | use::kHnd | use::kXpacked;
  c[Axis::kMask] =
      use::kNoMask | use::kCausal | use::kWindow | use::kKeyMasks | use::kRanges | use::kFinished | use::kSkipDecode;
  c[Axis::kScore] = use::kPlain | use::kSoftcap | use::kAlibi | use::kAlibiSqrt | use::kBias | use::kNewTokenBias |
                    use::kT5 | use::kSinks;
  c[Axis::kOutput] = use::kOutF32 | use::kOutF16 | use::kOutBf16 | use::kOutE4m3 | use::kLse | use::kMaxLogits;
  c[Axis::kDeterminism] = use::kRunToRun | use::kBatchInvariant;
  c.head_dim_qk_max = c.head_dim_v_max = 256;
  return c;
}

int score_kinds(const Problem& p) {
  uint32_t kinds = p.score_kinds();
  if (p.new_token_bias) kinds |= use::kBias;
  return static_cast<int>(kinds & ~(use::kNewTokenBias | use::kSinks));
}

int mask_kinds(const Problem& p) {
  const uint32_t kinds = p.mask_kinds() & use::kCompiledMasks;
  return static_cast<int>(p.num_ranges > 0 ? kinds : kinds & ~use::kRanges);
}

// The first distance of each logarithmic bucket. The device compares integers with these and takes no logarithm.
kernels::T5Table t5_buckets(const Problem& p) {
  kernels::T5Table t{};
  if (!p.t5_bias || !table_refusal(p).empty()) return t;
  const int64_t buckets = t5_direction_buckets(p), exact = buckets / 2;
  const auto bucket_of = [&](int64_t distance) {
    return t5_bucket(-distance, p.t5_num_buckets, p.t5_max_distance, p.t5_bidirectional);
  };
  t.bidirectional = p.t5_bidirectional ? 1 : 0;
  t.buckets = static_cast<int>(buckets), t.exact = static_cast<int>(exact);
  t.max_distance = static_cast<int>(std::min<int64_t>(p.t5_max_distance, std::numeric_limits<int>::max()));
  for (int64_t bucket = exact + 1; bucket < buckets; ++bucket) {
    int64_t low = exact, high = t.max_distance;  // the first distance that reaches it
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (bucket_of(middle) >= bucket) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    t.first[t.steps++] = static_cast<int>(low);
  }
  return t;
}

std::string table_refusal(const Problem& p) {
  if (p.t5_bias && t5_direction_buckets(p) - t5_direction_buckets(p) / 2 > kernels::kMaxT5Steps)
    return "more than 128 T5 buckets in one direction";
  return "";
}

void check_ranges(const Problem& p, int mask) {
  require((mask_kinds(p) & ~mask) == 0, "bidirectional_ranges.shape[1] is ", p.num_ranges, "; the plan was made for 0");
}

void require_taken(const char* kernel, const std::string& why) {
  if (!why.empty()) fail(ATTUNE_UNSUPPORTED, "kernel ", kernel, " does not take ", why);
}
void require_still_taken(const char* kernel, const std::string& why) {
  require(why.empty(), "attention differs from its plan: kernel ", kernel, " does not take ", why);
}

}  // namespace attune::cuda::attention
