// SPDX-License-Identifier: Apache-2.0
// What one pair of a query and a key adds to the gradients. docs/semantics.md, "The backward of attention".
#pragma once

#include "check/backward_params.h"
#include "check/keys.cuh"
#include "check/scores.h"

namespace attune::oracle {

// A sum of products, and the sum of their magnitudes.
struct Product {
  double sum, abs;
};

__device__ inline Product product(const Row& x, const Row& y, int n) {
  Product p = {0, 0};
  for (int d = 0; d < n; ++d) {
    const double term = channel(x, d) * channel(y, d);
    p.sum += term;
    p.abs += fabs(term);
  }
  return p;
}

// The sums that reference::Gradient has for one element.
struct Sums {
  double value, terms, parts, scores, factors;
};

// P, dZ or dX of a pair, by which a row of q, k or dout is multiplied; and what the pair adds to Sums::parts and
// Sums::scores, for the error bound.
struct Coefficient {
  double value, part, score;
};

__device__ inline void add(Sums& to, const Coefficient& c, double x) {
  const double abs = fabs(x), term = c.value * x;
  to.value += term;
  to.terms += fabs(term);
  to.parts += c.part * abs;
  to.scores += c.score * abs;
  to.factors += abs;
}

// The same for tables, whose terms are multiplied by nothing.
__device__ inline void add(Sums& to, const Coefficient& c) {
  to.value += c.value;
  to.terms += fabs(c.value);
  to.parts += c.part;
  to.scores += c.score;
}

__device__ inline void store(const Gradient& g, long long at, const Sums& s) {
  g.value[at] = s.value;
  g.bound[at] = bound_of_gradient(g.terms, s.terms, s.parts, s.scores, s.factors);
}

// What all pairs of a query and head share.
struct QueryTerms {
  bool sees;  // its lse is not -inf
  Product delta;
  double lse, dlse;
  double share, sink_gap;  // as in reference/backward.cpp
};

// The element (row, head) of a tensor shaped like lse.
__device__ inline double row_number(const Tensor& t, long long row, long long head) {
  return t.rank == 3 ? number_at(t, row / t.shape[1], row % t.shape[1], head) : number_at(t, row, head);
}

__device__ inline QueryTerms query_terms(const BackwardOracleParams& p, long long row, long long head) {
  QueryTerms q = {false, {0, 0}, row_number(p.lse, row, head), 0, 1, 0};
  if (q.lse == -infinity()) return q;
  q.sees = true;
  q.delta = product(dense_row(p.dout, row, head), dense_row(p.out, row, head), p.forward.head_dim_v);
  if (present(p.dlse)) q.dlse = row_number(p.dlse, row, head);
  if (present(p.forward.sinks)) {
    const double gap = number_at(p.forward.sinks, head) - q.lse, of_sink = 1 / (1 + exp(-gap));
    q.share = 1 / (1 + exp(gap));
    q.sink_gap = of_sink > 0 && q.share > 0 ? of_sink * fabs(gap) : 0.0;
  }
  return q;
}

struct Pair {
  bool counts;  // the pair is visible and its score is not -inf
  Coefficient dz, dx, p;
};

__device__ inline Pair pair_of(const BackwardOracleParams& params, const QueryTerms& terms, const Query& q,
                               long long key_row, long long key) {
  const OracleParams& f = params.forward;
  Pair pair = {false, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}};
  if (!terms.sees || !is_visible(f, q, key)) return pair;
  const long long kv_head = q.head / (f.heads_q / f.heads_kv);
  const Product qk = product(dense_row(f.q, q.row, q.head), dense_row(f.k, key_row, kv_head), f.head_dim_qk);
  const double z = score(f, f.softmax_scale, q, key, qk.sum);
  if (z == -infinity()) return pair;
  pair.counts = true;
  const double a = exp(z - terms.lse), p = a * terms.share, x = f.softmax_scale * qk.sum;
  const double scale = fabs(f.softmax_scale), x_abs = scale * qk.abs;
  double slope = 1, bend = 0;  // the slope of the softcap, and how fast the slope changes
  if (f.softcap > 0) {
    const double t = tanh(x / f.softcap);
    slope = 1 - t * t;
    bend = 2 * fabs(t) * slope / f.softcap;
  }
  // P = 0 has no error, however large its exponent is.
  const double exponent = a == 0 ? 0 : x_abs + fabs(terms.lse) + terms.sink_gap;
  const Product dp =
      product(dense_row(params.dout, q.row, q.head), dense_row(f.v, key_row, kv_head), f.head_dim_v);
  pair.p = {p, p, p * exponent};
  pair.dz.value = p * (dp.sum - terms.delta.sum) + a * terms.dlse;
  pair.dz.part = p * (dp.abs + terms.delta.abs) + a * fabs(terms.dlse);
  pair.dz.score = fabs(pair.dz.value) * exponent;
  pair.dx.value = f.softmax_scale * slope * pair.dz.value;
  pair.dx.part = scale * pair.dz.part;
  pair.dx.score = scale * (slope * pair.dz.score + bend * x_abs * fabs(pair.dz.value));
  return pair;
}

}  // namespace attune::oracle
