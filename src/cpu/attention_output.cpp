// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_output.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "core/dtype.h"

namespace attune::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLn2 = std::numbers::ln2_v<float>;
constexpr float kLog2e = std::numbers::log2e_v<float>;

void store_scalar(const RowView& view, int64_t row, int64_t head, float x) {
  if (view) std::memcpy(view.at(row, head), &x, sizeof(x));
}

void store_out(const Problem& p, int64_t q_row, int64_t head, const float* o) {
  std::byte* to = p.out.at(q_row, head);
  const int64_t n = p.head_dim_v, step = p.out.dim_stride * p.out.element_size;
  if (p.out.dim_stride == 1 && p.out.dtype == ATTUNE_FLOAT32) {
    std::memcpy(to, o, static_cast<size_t>(n) * sizeof(float));
  } else if (p.out.dim_stride == 1 && p.out.dtype == ATTUNE_BFLOAT16) {
    auto* out = reinterpret_cast<uint16_t*>(to);
    for (int64_t c = 0; c < n; ++c) out[c] = float_to_bf16(o[c]);
  } else {
    for (int64_t c = 0; c < n; ++c) store_from_float(p.out.dtype, o[c], to + c * step);
  }
}

}  // namespace

void store_empty_row(const Problem& p, int64_t q_row, int64_t head, float* o) {
  std::fill(o, o + p.head_dim_v, 0.0f);
  store_out(p, q_row, head, o);
  store_scalar(p.lse, q_row, head, -kInf);
  store_scalar(p.max_logits, q_row, head, -kInf);
}

void store_row(const Problem& p, int64_t q_row, int64_t head, float* o, float row_max, float row_sum) {
  if (row_max == -kInf && row_sum == 0) {
    store_empty_row(p, q_row, head, o);
    return;
  }
  float factor = 1.0f / row_sum;
  if (p.sinks) {
    const float sink = p.sinks(head) * kLog2e;
    // Relative to the larger of the two, so that neither exponential overflows. An infinite sink takes all weight.
    const float top = std::max(row_max, sink);
    factor =
        sink == kInf ? 0.0f : std::exp2(row_max - top) / (row_sum * std::exp2(row_max - top) + std::exp2(sink - top));
    if (std::isnan(sink)) factor = sink;
  }
  if (p.out_scale != nullptr) factor *= *p.out_scale;
  for (int64_t c = 0; c < p.head_dim_v; ++c) o[c] *= factor;
  store_out(p, q_row, head, o);
  store_scalar(p.lse, q_row, head, (row_max + std::log2(row_sum)) * kLn2);
  // row_max ignores NaN; row_sum shows it.
  store_scalar(p.max_logits, q_row, head, std::isnan(row_sum) && row_max != kInf ? row_sum : row_max * kLn2);
}

void save_partial(const Problem& p, const Item& item, const Scratch& scratch, float* slot) {
  const int64_t stride = partial_row_floats(p);
  for (int r = 0; r < item.num_rows * item.num_heads; ++r) {
    float* to = slot + r * stride;
    to[0] = scratch.row_max[r];
    to[1] = scratch.row_sum[r];
    std::memcpy(to + 2, scratch.o + r * scratch.ld_o, static_cast<size_t>(p.head_dim_v) * sizeof(float));
  }
}

void merge_partials(const Problem& p, const Sequence& s, const MergeTask& task, const float* slots, int64_t slot_floats,
                    float* o) {
  const int64_t stride = partial_row_floats(p);
  for (int r = 0; r < task.num_rows * task.num_heads; ++r) {
    const float* row = slots + task.first * slot_floats + r * stride;
    float top = -kInf;
    for (int i = 0; i < task.count; ++i) {
      const float m = row[i * slot_floats];
      top = m > top || std::isnan(m) ? m : top;
    }
    float sum = 0;
    std::fill(o, o + p.head_dim_v, 0.0f);
    for (int i = 0; i < task.count; ++i) {
      const float* part = row + i * slot_floats;
      if (part[0] == -kInf && part[1] == 0) continue;  // this part saw no key
      const float weight = std::exp2(part[0] - top);
      sum += weight * part[1];
      for (int64_t c = 0; c < p.head_dim_v; ++c) o[c] += weight * part[2 + c];
    }
    const int64_t packed = task.row_begin + r % task.num_rows, kv_head = task.kv_head + r / task.num_rows;
    store_row(p, s.q_begin + packed / p.group, kv_head * p.group + packed % p.group, o, top, sum);
  }
}

}  // namespace attune::cpu
