// SPDX-License-Identifier: Apache-2.0
// out = sum_i exp(lse_i - lse) out_i [/ (1 + exp(sink - lse))], lse = log sum_i exp(lse_i). Weights in double, sums in
// fp32, parts in order.
#include "cpu/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/rows.h"

namespace attune::cpu {
namespace {

constexpr int64_t kChunk = 256;  // columns at a time
constexpr double kInf = std::numeric_limits<double>::infinity();

double part_lse(const MergeProblem& op, int64_t part, int64_t row, int64_t head) {
  return *reinterpret_cast<const float*>(op.partial_lse.at(row, head) + part * op.lse_part_bytes);
}

// The largest lse of the parts and the sum of exp(lse_i - largest).
struct Total {
  double largest = -kInf, sum = 0;
  bool seen = false;  // some part saw a key
};

Total total_of(const MergeProblem& op, int64_t row, int64_t head) {
  Total t;
  for (int64_t i = 0; i < op.parts; ++i) {
    const double lse = part_lse(op, i, row, head);
    t.seen = t.seen || lse != -kInf;
    t.largest = lse > t.largest ? lse : t.largest;
  }
  for (int64_t i = 0; i < op.parts; ++i) {
    const double lse = part_lse(op, i, row, head);
    if (lse != -kInf) t.sum += std::exp(lse - t.largest);
  }
  return t;
}

void merge_columns(const MergeProblem& op, const Total& t, double denominator, int64_t row, int64_t head, int64_t first,
                   int64_t n) {
  float sum[kChunk] = {};
  float part[kChunk];
  const RowView& in = op.partial_out;
  for (int64_t i = 0; i < op.parts; ++i) {
    const double lse = part_lse(op, i, row, head);
    if (lse == -kInf) continue;  // its columns may hold anything
    const float weight = static_cast<float>(std::exp(lse - t.largest) / denominator);
    read_elements(in.dtype, in.at(row, head) + i * op.out_part_bytes + first * in.dim_stride * in.element_size,
                  in.dim_stride, n, part);
    for (int64_t d = 0; d < n; ++d) sum[d] += weight * part[d];
  }
  if (op.out_scale != nullptr) {
    for (int64_t d = 0; d < n; ++d) sum[d] *= *op.out_scale;
  }
  write_elements(op.out.dtype, op.out.at(row, head) + first * op.out.dim_stride * op.out.element_size,
                 op.out.dim_stride, n, sum);
}

void merge_row(const MergeProblem& op, int64_t row, int64_t head) {
  const Total t = total_of(op, row, head);
  // With a sink far above every score this is infinite, and the row 0.
  double denominator = t.sum;
  if (op.sinks) denominator += std::exp(static_cast<double>(op.sinks(head)) - t.largest);
  if (op.lse) {
    *reinterpret_cast<float*>(op.lse.at(row, head)) = static_cast<float>(t.seen ? t.largest + std::log(t.sum) : -kInf);
  }
  for (int64_t d = 0; d < op.head_dim_v; d += kChunk) {
    merge_columns(op, t, denominator, row, head, d, std::min(kChunk, op.head_dim_v - d));
  }
}

}  // namespace

void run_merge(const MergeProblem& op) {
  if (op.head_dim_v == 0 && !op.lse) return;  // nothing to write: spares the loop over the rows
  parallel_for(op.rows * op.heads, [&](int64_t i) { merge_row(op, i / op.heads, i % op.heads); });
}

}  // namespace attune::cpu
