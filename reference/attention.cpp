// SPDX-License-Identifier: Apache-2.0
// The operation itself. Rows that share keys are evaluated together, so that a key is decoded once for all of them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "reference/operation.h"
#include "reference/product.h"
#include "reference/reference.h"
#include "reference/score.h"
#include "reference/softmax.h"

namespace attune::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr size_t kRowsAtOnce = 64;  // bounds the memory for the scores

RowResult empty_result(const Operation& op) {
  RowResult result;
  result.written = true;
  result.out.assign(static_cast<size_t>(op.head_dim_v), 0.0);
  result.pv_abs = result.v_abs = result.pv_lost = result.out;
  result.lse = result.max_logit = -kInfinity;
  return result;
}

// One row on its way: its query, its scores against all keys, its result.
struct Row {
  Query query;
  std::vector<double> q, q_lost;
  std::vector<bool> visible;
  std::vector<double> z;  // -inf where not visible
  RowResult* result;
};

// Sum of |x| lost; 0 where nothing is lost.
double sum_lost(const std::vector<double>& x, const std::vector<double>& lost) {
  double sum = 0;
  for (size_t d = 0; d < lost.size(); ++d) sum += std::fabs(x[d]) * lost[d];
  return sum;
}

void score_key(const Operation& op, const std::vector<double>& k, const std::vector<double>& k_lost, int64_t position,
               size_t j, Row& row) {
  const Product qk = product(row.q, k);
  row.z[j] = score(op, row.query, position, qk.sum);
  if (row.z[j] != -kInfinity) {  // else the key counts for nothing
    const double scale = std::fabs(softmax_scale(op.a));
    row.result->z_abs = std::max(row.result->z_abs, scale * qk.abs);
    row.result->z_lost = std::max(row.result->z_lost, scale * (sum_lost(row.q, k_lost) + sum_lost(k, row.q_lost)));
  }
  ++row.result->num_visible;
}

void add_value(double p, const std::vector<double>& v, const std::vector<double>& v_lost, RowResult& result) {
  double* __restrict const out = result.out.data();
  double* __restrict const pv_abs = result.pv_abs.data();
  double* __restrict const v_abs = result.v_abs.data();
  for (size_t d = 0; d < v.size(); ++d) {
    out[d] += p * v[d];
    pv_abs[d] += p * std::fabs(v[d]);
    v_abs[d] += std::fabs(v[d]);
  }
  for (size_t d = 0; d < v_lost.size(); ++d) result.pv_lost[d] += p * v_lost[d];
}

// Evaluates rows of one sequence and one KV head against the same keys. Bytes of a key that no row sees are never read.
void evaluate(const Operation& op, int64_t b, int64_t kv_head, const std::vector<Key>& keys, std::vector<Row>& rows) {
  for (Row& row : rows) {
    *row.result = empty_result(op);
    row.q = op.query(b, row.query.row, row.query.head);
    row.q_lost = op.query_lost(b, row.query.row, row.query.head);
    row.z.assign(keys.size(), -kInfinity);
    row.visible.assign(keys.size(), true);
    for (size_t j = 0; j < keys.size() && !op.is_sparse(); ++j)
      row.visible[j] = is_visible(op.a, row.query, keys[j].position);
  }
  for (size_t j = 0; j < keys.size(); ++j) {
    std::vector<double> k, k_lost;
    for (Row& row : rows) {
      if (!row.visible[j]) continue;
      if (k.empty()) k = op.key(b, keys[j], kv_head), k_lost = op.key_lost(b, keys[j], kv_head);
      score_key(op, k, k_lost, keys[j].position, j, row);
    }
  }
  std::vector<Softmax> softmaxes;
  for (Row& row : rows) {
    const double sink = present(op.a.sinks) ? number_at(op.a.sinks, row.query.head) : -kInfinity;
    softmaxes.emplace_back(row.z, sink);
    row.result->lse = softmaxes.back().lse();
    row.result->max_logit = softmaxes.back().max();
  }
  for (size_t j = 0; j < keys.size(); ++j) {
    std::vector<double> v, v_lost;
    for (size_t r = 0; r < rows.size(); ++r) {
      if (!rows[r].visible[j] || softmaxes[r].ignores(rows[r].z[j])) continue;
      if (v.empty()) v = op.value(b, keys[j], kv_head), v_lost = op.value_lost(b, keys[j], kv_head);
      const double p = softmaxes[r].probability(rows[r].z[j]);
      rows[r].result->largest_p = std::max(rows[r].result->largest_p, p);
      add_value(p, v, v_lost, *rows[r].result);
    }
  }
}

// Rows that have the same keys: one sequence and KV head; with indices one row of q and KV head.
struct Group {
  int64_t sequence, row, kv_head;
  auto operator<=>(const Group&) const = default;
};

void evaluate_group(const Operation& op, const Group& group, const std::vector<Key>& keys,
                    const std::vector<RowHead>& wanted, const std::vector<size_t>& members,
                    std::vector<RowResult>& results) {
  const Sequence& s = op.sequences[static_cast<size_t>(group.sequence)];
  for (size_t first = 0; first < members.size(); first += kRowsAtOnce) {
    std::vector<Row> rows;
    for (size_t i = first; i < std::min(first + kRowsAtOnce, members.size()); ++i) {
      const RowHead& at = wanted[members[i]];
      const int64_t index = at.row - s.first_query;
      rows.push_back(
          {{group.sequence, at.row, index, s.position(index), at.head}, {}, {}, {}, {}, &results[members[i]]});
    }
    evaluate(op, group.sequence, group.kv_head, keys, rows);
  }
}

}  // namespace

std::vector<RowResult> attention(const attune_attention& a, const std::vector<RowHead>& rows) {
  const Operation op(a);
  std::vector<RowResult> results(rows.size());
  std::map<Group, std::vector<size_t>> groups;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t b = op.sequence_of(rows[i].row);
    if (b < 0) continue;
    if (op.is_skipped(b)) {
      if (a.zero_finished != 0) results[i] = empty_result(op);
      continue;
    }
    groups[{b, op.is_sparse() ? rows[i].row : 0, op.kv_head(rows[i].head)}].push_back(i);
  }
  int64_t sequence = -1;
  std::vector<Key> keys;
  for (const auto& [group, members] : groups) {
    if (op.is_sparse()) {
      keys = op.keys_of_row(group.sequence, group.row, group.kv_head);
    } else if (group.sequence != sequence) {
      keys = op.keys_of_sequence(group.sequence);
      sequence = group.sequence;
    }
    evaluate_group(op, group, keys, rows, members, results);
  }
  return results;
}

std::vector<RowResult> attention(const attune_attention& a) {
  std::vector<RowHead> rows;
  const int64_t heads = a.q.shape[a.q.rank - 2];
  for (int64_t row = 0; row < num_rows(a); ++row) {
    for (int64_t head = 0; head < heads; ++head) rows.push_back({row, head});
  }
  return attention(a, rows);
}

}  // namespace attune::reference
