// SPDX-License-Identifier: Apache-2.0
#include "reference/backward.h"

#include <cmath>
#include <limits>

#include "reference/operation.h"
#include "reference/product.h"
#include "reference/reference.h"
#include "reference/score.h"

namespace attune::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The factor of a row of numbers in a gradient, and what it adds to Gradient::parts and scores, never negative.
struct Weight {
  double value = 0, part = 0, score = 0;
};

// Gradient::add of every element of a row, most of a test's time. The compiler makes vectors of it, as no two overlap.
void add_row(const Weight& weight, const std::vector<double>& x, int64_t row, Gradient& to) {
  const size_t first = static_cast<size_t>(row) * x.size();
  double* __restrict const value = to.value.data() + first;
  double* __restrict const terms = to.terms.data() + first;
  double* __restrict const parts = to.parts.data() + first;
  double* __restrict const scores = to.scores.data() + first;
  double* __restrict const factors = to.factors.data() + first;
  for (size_t i = 0; i < x.size(); ++i) {
    const double abs = std::fabs(x[i]);
    value[i] += weight.value * x[i];
    terms[i] += std::fabs(weight.value) * abs;
    parts[i] += weight.part * abs;
    scores[i] += weight.score * abs;
    factors[i] += abs;
  }
}

// Element (row, head) of a tensor like lse.
double row_number(const attune_tensor& t, int64_t row, int64_t head) {
  return t.rank == 3 ? number_at(t, row / t.shape[1], row % t.shape[1], head) : number_at(t, row, head);
}

// What all pairs of a query have in common.
struct Row {
  Query query;
  std::vector<double> q, dout;
  Product delta;  // <dout, out>
  double lse = 0, dlse = 0;
  double share = 1;     // what the sink leaves to the keys
  double sink_gap = 0;  // the magnitude in the share's exponent, as far as it matters
};

// The keys of a sequence for one KV head. A row that nobody sees is never read.
class KeyRows {
 public:
  KeyRows(const Operation& op, int64_t b, int64_t kv_head)
      : op_(op), b_(b), kv_head_(kv_head), keys_(op.keys_of_sequence(b)), k_(keys_.size()), v_(keys_.size()) {}
  size_t size() const { return keys_.size(); }
  int64_t position(size_t j) const { return keys_[j].position; }
  int64_t row(size_t j) const { return keys_[j].row; }
  const std::vector<double>& k(size_t j) {
    if (k_[j].empty()) k_[j] = op_.key(b_, keys_[j], kv_head_);
    return k_[j];
  }
  const std::vector<double>& v(size_t j) {
    if (v_[j].empty()) v_[j] = op_.value(b_, keys_[j], kv_head_);
    return v_[j];
  }

 private:
  const Operation& op_;
  int64_t b_, kv_head_;
  std::vector<Key> keys_;
  std::vector<std::vector<double>> k_, v_;
};

class Pass {
 public:
  Pass(const Operation& op, const attune_tensor& dout, const attune_tensor& dlse, const BackwardSample* sample,
       Backward& to)
      : op_(op), a_(op.a), dlse_(dlse), out_(op.a.out), dout_(dout), to_(to) {
    const bool tables = present(a_.bias) || present(a_.t5_bias);
    if (sample != nullptr && !(sample->tables && tables)) sample_ = sample;
  }

  void add_sequence(int64_t b) {
    const Sequence& s = op_.sequences[static_cast<size_t>(b)];
    const int64_t group = op_.num_heads_q / op_.num_heads_kv;
    for (int64_t kv_head = 0; kv_head < op_.num_heads_kv; ++kv_head) {
      KeyRows keys(op_, b, kv_head);
      std::vector<size_t> all, sampled;
      for (size_t j = 0; j < keys.size(); ++j) {
        all.push_back(j);
        const int64_t kv_row = keys.row(j) * op_.num_heads_kv + kv_head;
        if (sample_ != nullptr && sample_->kv[static_cast<size_t>(kv_row)]) sampled.push_back(j);
      }
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int64_t i = 0; i < s.num_queries; ++i) {
          const auto q_row = static_cast<size_t>((s.first_query + i) * op_.num_heads_q + head);
          const bool whole = sample_ == nullptr || sample_->q[q_row];
          add_query({b, s.first_query + i, i, s.position(i), head}, keys, whole ? all : sampled);
        }
      }
    }
  }

 private:
  // wanted: the keys whose pairs count.
  void add_query(const Query& query, KeyRows& keys, const std::vector<size_t>& wanted) {
    if (wanted.empty() && !present(a_.sinks)) return;
    Row row;
    row.query = query;
    row.lse = row_number(a_.lse, query.row, query.head);
    if (row.lse == -kInfinity) return;  // it sees nothing
    row.q = op_.query(query.b, query.row, query.head);
    row.dout = dout_.row(query.row, query.head);
    row.delta = product(row.dout, out_.row(query.row, query.head));
    if (present(dlse_)) row.dlse = row_number(dlse_, query.row, query.head);
    if (present(a_.sinks)) add_sink(row);
    for (const size_t j : wanted) {
      if (is_visible(a_, query, keys.position(j))) add_pair(row, keys, j);
    }
  }

  // The sink is a key whose value is 0.
  void add_sink(Row& row) {
    const double gap = number_at(a_.sinks, row.query.head) - row.lse;
    row.share = 1.0 / (1.0 + std::exp(gap));
    const double p = 1.0 / (1.0 + std::exp(-gap));
    row.sink_gap = p > 0 && row.share > 0 ? p * std::fabs(gap) : 0.0;
    to_.dsinks.add(static_cast<size_t>(row.query.head), -p * row.delta.sum, p * row.delta.abs,
                   p * std::fabs(row.delta.sum * (std::isfinite(gap) ? gap : 0.0)), 0);
  }

  void add_pair(const Row& row, KeyRows& keys, size_t j) {
    const Query& query = row.query;
    const double scale = softmax_scale(a_);
    const Product qk = product(row.q, keys.k(j));
    const double z = score(op_, query, keys.position(j), qk.sum);
    if (z == -kInfinity) return;                                // the key counts for nothing
    const double a = std::exp(z - row.lse), p = a * row.share;  // without the sink, and with it
    const double x = scale * qk.sum, x_abs = std::fabs(scale) * qk.abs;
    double slope = 1, bend = 0;  // of the softcap, and how fast the slope changes
    if (a_.softcap > 0) {
      const double t = std::tanh(x / a_.softcap);
      slope = 1 - t * t;
      bend = 2 * std::fabs(t) * slope / a_.softcap;
    }
    // A weight of 0 has no error, however large its exponent is.
    const double exponent = a == 0 ? 0 : x_abs + std::fabs(row.lse) + row.sink_gap;

    const Product dp = product(row.dout, keys.v(j));
    Weight dz;
    dz.value = p * (dp.sum - row.delta.sum) + a * row.dlse;
    dz.part = p * (dp.abs + row.delta.abs) + a * std::fabs(row.dlse);
    dz.score = std::fabs(dz.value) * exponent;
    Weight dx;
    dx.value = scale * slope * dz.value;
    dx.part = std::fabs(scale) * dz.part;
    dx.score = std::fabs(scale) * (slope * dz.score + bend * x_abs * std::fabs(dz.value));

    const int64_t q_row = query.row * op_.num_heads_q + query.head;
    const int64_t kv_row = keys.row(j) * op_.num_heads_kv + op_.kv_head(query.head);
    add_row(dx, keys.k(j), q_row, to_.dq);
    add_row(dx, row.q, kv_row, to_.dk);
    add_row({p, p, p * exponent}, row.dout, kv_row, to_.dv);
    add_to_tables(query, keys.position(j), dz);
  }

  void add_to_tables(const Query& query, int64_t key, const Weight& dz) {
    const attune_tensor &bias = a_.bias, &t5 = a_.t5_bias;
    if (present(bias) && query.position >= 0 && query.position < bias.shape[1] && key < bias.shape[2]) {
      const int64_t head = bias.shape[0] == 1 ? 0 : query.head;
      const int64_t at = (head * bias.shape[1] + query.position) * bias.shape[2] + key;
      to_.dbias.add(static_cast<size_t>(at), dz.value, dz.part, dz.score, 0);
    }
    if (present(t5)) {
      const int64_t bucket =
          oracle::t5_bucket(key - query.position, t5.shape[1], a_.t5_max_distance, a_.t5_bidirectional != 0);
      to_.dt5_bias.add(static_cast<size_t>(query.head * t5.shape[1] + bucket), dz.value, dz.part, dz.score, 0);
    }
  }

  const Operation& op_;
  const attune_attention& a_;
  const attune_tensor& dlse_;
  const BackwardSample* sample_ = nullptr;  // null: every pair counts
  Rows out_, dout_;
  Backward& to_;
};

}  // namespace

Backward attention_backward(const attune_attention& a, const attune_tensor& dout, const attune_tensor& dlse,
                            const BackwardSample* sample) {
  const Operation op(a);
  const int64_t rows_kv = Rows(a.k).count(), dim_qk = a.q.shape[a.q.rank - 1];
  Backward result;
  result.dq = Gradient(op.num_rows * op.num_heads_q * dim_qk);
  result.dk = Gradient(rows_kv * op.num_heads_kv * dim_qk);
  result.dv = Gradient(rows_kv * op.num_heads_kv * op.head_dim_v);
  if (present(a.sinks)) result.dsinks = Gradient(op.num_heads_q);
  if (present(a.bias)) result.dbias = Gradient(a.bias.shape[0] * a.bias.shape[1] * a.bias.shape[2]);
  if (present(a.t5_bias)) result.dt5_bias = Gradient(a.t5_bias.shape[0] * a.t5_bias.shape[1]);
  result.q_written.assign(static_cast<size_t>(op.num_rows), false);
  result.kv_written.assign(static_cast<size_t>(rows_kv), false);
  attune_attention whole = a;  // keys that are there but not in use belong to their sequence, too
  whole.seqused_kv = {};
  const Operation extents(whole);
  for (size_t b = 0; b < op.sequences.size(); ++b) {
    const Sequence& s = extents.sequences[b];
    for (int64_t i = 0; i < s.num_queries; ++i) result.q_written[static_cast<size_t>(s.first_query + i)] = true;
    for (int64_t j = 0; j < s.num_dense; ++j) result.kv_written[static_cast<size_t>(s.first_dense + j)] = true;
  }
  Pass pass(op, dout, dlse, sample, result);
  for (size_t b = 0; b < op.sequences.size(); ++b) pass.add_sequence(static_cast<int64_t>(b));
  return result;
}

}  // namespace attune::reference
