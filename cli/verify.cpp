// SPDX-License-Identifier: Apache-2.0
#include "verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <set>

#include "attune/attune.hpp"
#include "cases/tensors.h"
#include "check/bounds.h"
#include "stopwatch.h"
#include "user_error.h"

namespace attune::cli {
namespace {

constexpr double kIndexRoundoff = 0x1p-20;  // of a score, by the sum of the magnitudes of its products

bool present(const attune_tensor& t) { return t.dtype != ATTUNE_DTYPE_NONE; }

// Products are formed from operands of this type, and so are probabilities.
attune_dtype compute_dtype(const attune_attention& a) {
  return a.q.dtype == ATTUNE_FLOAT32 || a.q.dtype == ATTUNE_FLOAT16 ? static_cast<attune_dtype>(a.q.dtype)
                                                                    : ATTUNE_BFLOAT16;
}

// Largest term that is added to the row's scores.
double additive(const attune_attention& a, int64_t head, int64_t num_visible) {
  double bound = 0;
  if (present(a.alibi_slopes)) {
    bound += std::fabs(cases::decode(ATTUNE_FLOAT32, cases::element_at(a.alibi_slopes, {head}))) *
             static_cast<double>(num_visible);
  }
  if (present(a.t5_bias)) {
    double largest = 0;
    for (int64_t i = 0; i < a.t5_bias.shape[1]; ++i) {
      largest = std::max(largest, std::fabs(cases::decode(static_cast<attune_dtype>(a.t5_bias.dtype),
                                                          cases::element_at(a.t5_bias, {head, i}))));
    }
    bound += largest;
  }
  return bound;
}

}  // namespace

VerifyOptions parse_verify(const std::string& text) {
  VerifyOptions options;
  std::string_view number = text;
  if (!number.empty() && number.back() == '%') {
    options.is_share = true;
    number.remove_suffix(1);
  }
  const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), options.amount);
  const bool whole = options.is_share || options.amount == std::floor(options.amount);
  if (number.empty() || error != std::errc() || stop != number.data() + number.size() || !(options.amount >= 0) ||
      !whole || !(options.amount <= (options.is_share ? 100.0 : 1e9))) {
    throw UserError(
        fmt::format("--verify is '{}'; it must be a number of rows of each call, or a share such as 0.5%", text));
  }
  if (options.is_share) options.amount /= 100;
  return options;
}

double error_bound(const attune_attention& a, const reference::RowHead& where, const reference::RowResult& row,
                   size_t dim) {
  const attune_dtype type = compute_dtype(a);
  const double compute = type == ATTUNE_FLOAT32 ? 0.0 : cases::unit_roundoff(type);
  const bool rope = present(a.prologue.rope_cos_sin), groups = a.cache.format != ATTUNE_KV_PLAIN;
  const bool v_is_part_of_k = !present(a.v) && !present(a.cache.v);
  const double inexact_qk = rope || groups ? compute : 0.0;
  const double inexact_v = groups || (v_is_part_of_k && rope) ? compute : 0.0;
  const double spread = std::min(1.0, 4.0 / std::sqrt(static_cast<double>(a.q.shape[a.q.rank - 1])));
  const double largest = std::isfinite(row.max_logit) ? std::fabs(row.max_logit) : 0.0;
  const double fp32 = std::ldexp(1.0, -21);
  const double score = row.z_abs * (fp32 + 1.5 * inexact_qk * spread) +
                       (additive(a, where.head, row.num_visible) + largest + static_cast<double>(a.softcap)) * fp32 +
                       row.z_lost * oracle::kOfPrologue;
  const double sums = std::ldexp(16 + 2 * std::sqrt(static_cast<double>(row.num_visible)), -24);
  const double weight = sums + compute + inexact_v;
  const double from_scores = 0.5 * std::expm1(2 * score) * (row.pv_abs[dim] + std::fabs(row.out[dim]));
  const double bound = row.pv_abs[dim] * weight + row.pv_lost[dim] * oracle::kOfPrologue + from_scores + 1e-36;
  return bound + cases::unit_roundoff(static_cast<attune_dtype>(a.out.dtype)) * (std::fabs(row.out[dim]) + bound);
}

std::string Mismatch::text() const {
  return fmt::format(
      "verification failed: step {}, {}, row {}, head {}, column {}: got {:.7g}, expected {:.7g}, allowed error {:.3g}",
      step, call, row, head, dim, value, expected, bound);
}

void Verifier::choose(const attune_attention& a, std::span<const int64_t> keys_of_row) {
  rows_.clear();
  const auto num_rows = static_cast<int64_t>(keys_of_row.size()), heads = a.out.shape[1], total = num_rows * heads;
  const double share = options_.is_share ? std::ceil(options_.amount * static_cast<double>(total)) : options_.amount;
  const auto wanted = static_cast<int64_t>(std::min(share, static_cast<double>(total)));
  int64_t keys = 0;
  std::set<int64_t> picked;
  for (int64_t i = 0; i < wanted; ++i) {
    // All of them in turn, or a sample.
    int64_t pair = i;
    while (wanted < total && !picked.insert(pair = random_.integer(0, total - 1)).second) {
    }
    const reference::RowHead where{pair / heads, pair % heads};
    keys += keys_of_row[static_cast<size_t>(where.row)];
    if (keys > options_.max_keys && !rows_.empty()) break;
    rows_.push_back(where);
  }
}

void Verifier::expect(const attune_attention& a, std::span<const int64_t> keys_of_row) {
  const Stopwatch watch;
  choose(a, keys_of_row);
  expected_ = rows_.empty() ? std::vector<reference::RowResult>() : reference::attention(a, rows_);
  for (const auto& [row, head] : rows_) {
    const auto bytes =
        static_cast<size_t>(a.out.shape[2] * cases::element_size(static_cast<attune_dtype>(a.out.dtype)));
    std::memset(cases::element_at(a.out, {row, head, 0}), 0xff, bytes);
  }
  seconds_ += watch.seconds();
}

void Verifier::compare_index(const attune_indexer& op, int64_t step) {
  const Stopwatch watch;
  const auto* offsets = static_cast<const int32_t*>(op.cu_seqlens_q.data);
  const int64_t total = op.q.shape[0], batch = op.seqused_kv.shape[0], topk = op.indices.shape[1];
  if (options_.amount == 0 || total == 0) return;
  const int64_t row = random_.integer(0, total - 1);
  const int64_t b = std::upper_bound(offsets, offsets + batch, row) - offsets - 1;
  // That row as a batch of its own, of the keys that it sees.
  const int32_t visible =
      static_cast<const int32_t*>(op.seqused_kv.data)[b] - (offsets[b + 1] - 1 - static_cast<int32_t>(row));
  if (visible > options_.max_keys) return;
  attune_indexer one = op;
  const auto cut = [](attune_tensor& t, int64_t at) {
    t.data =
        static_cast<std::byte*>(t.data) + at * t.stride[0] * cases::element_size(static_cast<attune_dtype>(t.dtype));
    t.shape[0] = 1;
  };
  cut(one.q, row), cut(one.weights, row), cut(one.cache.page_table, b);
  one.cu_seqlens_q = {};
  one.seqused_kv = dense(&visible, {1});
  const reference::IndexRow expected = reference::index_rows(one)[0];

  const int32_t* chosen = static_cast<const int32_t*>(op.indices.data) + row * topk;
  const int64_t count = std::min<int64_t>(topk, visible);
  bool failed = static_cast<const int32_t*>(op.topk_length.data)[row] != count;
  double worst_chosen = INFINITY, best_left = -INFINITY;
  int64_t next = 0, left = -1;
  for (size_t i = 0; i < expected.entries.size(); ++i) {
    const double error = expected.scores_abs[i] * kIndexRoundoff;
    if (next < count && chosen[next] == expected.entries[i]) {
      ++next;
      worst_chosen = std::min(worst_chosen, expected.scores[i] + error);
    } else if (!(expected.scores[i] - error <= best_left)) {
      best_left = expected.scores[i] - error;
      left = expected.positions[i];
    }
  }
  failed = failed || next != count || !(best_left <= worst_chosen);
  for (int64_t i = count; i < topk; ++i) failed = failed || chosen[i] != -1;
  if (failed && !first_mismatch_)
    first_mismatch_ = Mismatch{step, row, 0, std::max<int64_t>(left, 0), "indexer", worst_chosen, best_left, 0};
  ++num_rows_;
  num_failed_ += failed ? 1 : 0;
  seconds_ += watch.seconds();
}

void Verifier::compare(const attune_attention& a, int64_t step, std::string_view call) {
  const Stopwatch watch;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const reference::RowResult& expected = expected_[i];
    const auto [row, head] = rows_[i];
    bool failed = false;
    for (size_t d = 0; d < expected.out.size(); ++d) {
      const double value = cases::decode(static_cast<attune_dtype>(a.out.dtype),
                                         cases::element_at(a.out, {row, head, static_cast<int64_t>(d)}));
      const double bound = error_bound(a, rows_[i], expected, d), error = std::fabs(value - expected.out[d]);
      const bool good = error <= bound;
      if (error / bound > worst_ratio_) worst_ratio_ = error / bound;
      if (good) continue;
      failed = true;
      if (!first_mismatch_) {
        first_mismatch_ =
            Mismatch{step, row, head, static_cast<int64_t>(d), std::string(call), value, expected.out[d], bound};
      }
    }
    ++num_rows_;
    num_failed_ += failed ? 1 : 0;
  }
  seconds_ += watch.seconds();
}

}  // namespace attune::cli
