// SPDX-License-Identifier: Apache-2.0
// The gradients of dense attention, from the forward's descriptor with its out and lse as they are stored.
#pragma once

#include <cstdint>
#include <vector>

#include "attune/attune.h"

namespace attune::reference {

// One gradient, row-major, and for each of its elements what bounds the error of a sum of these terms in fp32.
struct Gradient {
  explicit Gradient(int64_t size = 0)
      : value(static_cast<size_t>(size)),
        terms(value.size()),
        parts(value.size()),
        scores(value.size()),
        factors(value.size()) {}
  void add(size_t at, double term, double part, double score, double factor) {
    value[at] += term;
    terms[at] += term < 0 ? -term : term;
    parts[at] += part;
    scores[at] += score;
    factors[at] += factor;
  }
  std::vector<double> value;
  std::vector<double> terms;  // sum of the magnitudes of the terms
  std::vector<double> parts;  // the same, with the magnitudes of what each term is a difference of: what cancels counts
  std::vector<double> scores;   // sum of the magnitudes of the terms, each times that of the numbers in its exponent
  std::vector<double> factors;  // sum of the magnitudes of what p or dx is multiplied with; 0 in the tables
};

// Which rows of dq, dk and dv are evaluated: [rows of q][num_heads_q] and [rows of k][num_heads_kv]. The others, and
// without tables dbias and dt5_bias, hold a part of their sum or nothing.
struct BackwardSample {
  std::vector<bool> q, kv;
  bool tables = true;
};

struct Backward {
  Gradient dq;                              // [rows of q][num_heads_q][head_dim_qk]
  Gradient dk, dv;                          // [rows of k][num_heads_kv][head_dim]
  Gradient dsinks;                          // [num_heads_q]
  Gradient dbias, dt5_bias;                 // as bias and t5_bias
  std::vector<bool> q_written, kv_written;  // by rows: false where no sequence owns the row
};

// Of sum(dout * out) + sum(dlse * lse), dlse optional, for every input. Dense keys and values only. sample null: whole.
Backward attention_backward(const attune_attention& a, const attune_tensor& dout, const attune_tensor& dlse,
                            const BackwardSample* sample = nullptr);

}  // namespace attune::reference
