// SPDX-License-Identifier: Apache-2.0
#include "reference/score.h"

#include <algorithm>
#include <cmath>

#include "reference/reference.h"

namespace attune::reference {
namespace {

bool inside_one_range(const attune_attention& a, const Query& query, int64_t key) {
  const attune_tensor& ranges = a.bidirectional_ranges;
  if (!present(ranges)) return false;
  for (int64_t i = 0; i < ranges.shape[1]; ++i) {
    const int64_t first = integer_at(ranges, {query.sequence, i, 0}), last = integer_at(ranges, {query.sequence, i, 1});
    const auto inside = [&](int64_t position) { return first <= position && position <= last; };
    if (first < last && inside(query.position) && inside(key)) return true;
  }
  return false;
}

bool mask_bit(const attune_attention& a, const Query& query, int64_t key) {
  const attune_tensor& bits = a.mask_bits;
  if (!present(bits)) return true;
  const int64_t bit = key - (present(a.mask_start) ? integer_at(a.mask_start, {query.sequence}) : 0);
  if (bit < 0 || bit >= 8 * bits.shape[bits.rank - 1]) return true;
  const int64_t byte =
      bits.rank == 3 ? integer_at(bits, {query.row, query.head, bit / 8}) : integer_at(bits, {query.row, bit / 8});
  return ((byte >> (bit % 8)) & 1) != 0;
}

double alibi(const attune_attention& a, const Query& query, int64_t key) {
  const attune_tensor& slopes = a.alibi_slopes;
  if (!present(slopes)) return 0;
  const double slope =
      slopes.rank == 2 ? number_at(slopes, {query.sequence, query.head}) : number_at(slopes, {query.head});
  const auto ahead = static_cast<double>(key - query.position);
  if (a.alibi_sqrt == 0) return slope * ahead;
  return ahead < 0 ? -slope * std::sqrt(-ahead) : 0.0;
}

double table_bias(const attune_attention& a, const Query& query, int64_t key) {
  const attune_tensor& bias = a.bias;
  if (!present(bias)) return 0;
  if (query.position < 0 || query.position >= bias.shape[1] || key >= bias.shape[2]) return 0;
  return number_at(bias, {bias.shape[0] == 1 ? 0 : query.head, query.position, key});
}

double new_token_bias(const attune_attention& a, const Query& query, int64_t key) {
  const attune_tensor& bias = a.new_token_bias;
  if (!present(bias)) return 0;
  const int64_t column = key - (query.position - query.index);  // the first new token stands where query 0 does
  if (query.index >= bias.shape[0] || column < 0 || column >= bias.shape[1]) return 0;
  return number_at(bias, {query.index, column});
}

double t5(const attune_attention& a, const Query& query, int64_t key) {
  if (!present(a.t5_bias)) return 0;
  const int64_t bucket =
      t5_bucket(key - query.position, a.t5_bias.shape[1], a.t5_max_distance, a.t5_bidirectional != 0);
  return number_at(a.t5_bias, {query.head, bucket});
}

}  // namespace

int64_t t5_bucket(int64_t relative_position, int64_t num_buckets, int64_t max_distance, bool bidirectional) {
  int64_t buckets = num_buckets, offset = 0, distance = std::max<int64_t>(-relative_position, 0);
  if (bidirectional) {
    buckets /= 2;
    offset = relative_position > 0 ? buckets : 0;
    distance = std::abs(relative_position);
  }
  const int64_t exact = buckets / 2;
  if (distance < exact) return offset + distance;
  const long double steps = std::log(static_cast<long double>(distance) / exact) /
                            std::log(static_cast<long double>(max_distance) / exact) *
                            static_cast<long double>(buckets - exact);
  // A distance that is exactly on a boundary must not fall below it by a rounding of the logarithms.
  const long double nearest = std::round(steps);
  const long double whole = std::fabs(steps - nearest) < 1e-13L ? nearest : std::floor(steps);
  return offset + std::min(exact + static_cast<int64_t>(whole), buckets - 1);
}

double softmax_scale(const attune_attention& a) {
  return a.softmax_scale != 0 ? static_cast<double>(a.softmax_scale)
                              : 1.0 / std::sqrt(static_cast<double>(a.q.shape[a.q.rank - 1]));
}

bool is_visible(const attune_attention& a, const Query& query, int64_t key) {
  const int64_t ahead = key - query.position;
  bool visible = true;
  if (a.causal != 0 && ahead > 0) visible = false;
  if (a.window_left >= 0 && -ahead > a.window_left) visible = false;
  if (a.window_right >= 0 && ahead > a.window_right) visible = false;
  if (inside_one_range(a, query, key)) visible = true;
  return visible && mask_bit(a, query, key);
}

double score(const Operation& op, const Query& query, int64_t key, double product) {
  const attune_attention& a = op.a;
  double z = softmax_scale(a) * product;
  if (a.softcap > 0) z = a.softcap * std::tanh(z / a.softcap);
  // What indices list has no positions.
  if (op.is_sparse()) return z;
  return z + alibi(a, query, key) + table_bias(a, query, key) + new_token_bias(a, query, key) + t5(a, query, key);
}

}  // namespace attune::reference
