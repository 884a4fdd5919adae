// SPDX-License-Identifier: Apache-2.0
// Masks, and the score z of a visible key. docs/semantics.md, "Which keys are visible" and "Additive terms". For host
// and device (check/host_device.h): p is an attune_attention or OracleParams, whose fields have the same names.
#pragma once

#include "check/elements.h"

namespace attune::oracle {

// One query of one head.
struct Query {
  long long b, row, index, position, head;  // index: in the sequence
};

ATTUNE_CHECK_BOTH bool inside_one_range(const auto& p, const Query& q, long long key) {
  const auto& ranges = p.bidirectional_ranges;
  if (!present(ranges)) return false;
  for (long long i = 0; i < ranges.shape[1]; ++i) {
    const long long first = integer_at(ranges, q.b, i, 0), last = integer_at(ranges, q.b, i, 1);
    const bool holds_query = first <= q.position && q.position <= last, holds_key = first <= key && key <= last;
    if (first < last && holds_query && holds_key) return true;
  }
  return false;
}

ATTUNE_CHECK_BOTH bool mask_bit(const auto& p, const Query& q, long long key) {
  const auto& bits = p.mask_bits;
  if (!present(bits)) return true;
  const long long bit = key - (present(p.mask_start) ? integer_at(p.mask_start, q.b) : 0);
  if (bit < 0 || bit >= 8 * bits.shape[bits.rank - 1]) return true;
  const long long byte =
      bits.rank == 3 ? integer_at(bits, q.row, q.head, bit / 8) : integer_at(bits, q.row, bit / 8);
  return (byte >> bit % 8 & 1) != 0;
}

ATTUNE_CHECK_BOTH bool is_visible(const auto& p, const Query& q, long long key) {
  const long long ahead = key - q.position;
  bool visible = true;
  if (p.causal != 0 && ahead > 0) visible = false;
  if (p.window_left >= 0 && -ahead > p.window_left) visible = false;
  if (p.window_right >= 0 && ahead > p.window_right) visible = false;
  if (inside_one_range(p, q, key)) visible = true;
  return visible && mask_bit(p, q, key);
}

ATTUNE_CHECK_BOTH double alibi(const auto& p, const Query& q, long long key) {
  const auto& slopes = p.alibi_slopes;
  if (!present(slopes)) return 0;
  const double slope = slopes.rank == 2 ? number_at(slopes, q.b, q.head) : number_at(slopes, q.head);
  const double ahead = static_cast<double>(key - q.position);
  if (p.alibi_sqrt == 0) return slope * ahead;
  return ahead < 0 ? -slope * sqrt(-ahead) : 0.0;
}

ATTUNE_CHECK_BOTH double table_bias(const auto& p, const Query& q, long long key) {
  const auto& bias = p.bias;
  if (!present(bias)) return 0;
  if (q.position < 0 || q.position >= bias.shape[1] || key >= bias.shape[2]) return 0;
  return number_at(bias, bias.shape[0] == 1 ? 0 : q.head, q.position, key);
}

ATTUNE_CHECK_BOTH double new_token_bias(const auto& p, const Query& q, long long key) {
  const auto& bias = p.new_token_bias;
  if (!present(bias)) return 0;
  const long long column = key - (q.position - q.index);  // the first new token has the position of query 0
  if (q.index >= bias.shape[0] || column < 0 || column >= bias.shape[1]) return 0;
  return number_at(bias, q.index, column);
}

ATTUNE_CHECK_BOTH long long t5_bucket(long long relative, long long num_buckets, long long max_distance,
                                      bool both_directions) {
  const long long buckets = both_directions ? num_buckets / 2 : num_buckets;
  const long long offset = both_directions && relative > 0 ? buckets : 0;
  long long distance = -relative;
  if (distance < 0) distance = both_directions ? relative : 0;
  const long long exact = buckets / 2;
  if (distance < exact) return offset + distance;
  const double unit = static_cast<double>(exact), most = static_cast<double>(max_distance) / unit;
  const double steps = log(static_cast<double>(distance) / unit) / log(most) * static_cast<double>(buckets - exact);
  // A distance exactly on a boundary must not fall below it by a rounding of the logarithms.
  const double nearest = rint(steps), whole = fabs(steps - nearest) < 1e-12 ? nearest : floor(steps);
  const long long bucket = exact + static_cast<long long>(whole);
  return offset + (bucket < buckets - 1 ? bucket : buckets - 1);
}

ATTUNE_CHECK_BOTH double t5(const auto& p, const Query& q, long long key) {
  if (!present(p.t5_bias)) return 0;
  const long long bucket =
      t5_bucket(key - q.position, p.t5_bias.shape[1], p.t5_max_distance, p.t5_bidirectional != 0);
  return number_at(p.t5_bias, q.head, bucket);
}

// The score z of a product <q, k>: scale, softcap, additive terms. Keys from index lists have no positions.
ATTUNE_CHECK_BOTH double score(const auto& p, double scale, const Query& q, long long key, double product) {
  double z = scale * product;
  if (p.softcap > 0) z = p.softcap * tanh(z / p.softcap);
  if (present(p.indices)) return z;
  return z + alibi(p, q, key) + table_bias(p, q, key) + new_token_bias(p, q, key) + t5(p, q, key);
}

}  // namespace attune::oracle
