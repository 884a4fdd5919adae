// SPDX-License-Identifier: Apache-2.0
// Error bounds of one row of attention, from sums that the oracle has of it. The same formulas on the host
// (tests/cases/compare.cpp) and on the device; no standard headers but for the host.
#pragma once

#include "check/host_device.h"

namespace attune::oracle {

// Unit errors of a problem; each is multiplied by a sum of the oracle's.
struct BoundTerms {
  double of_products;  // error of z, to z_abs
  double additive;     // the largest |terms added after the softcap|
  double of_p;         // rounding of p, relative
  double of_values;    // rounding of v, relative
  double of_sum;       // rounding of what the row sum adds up, relative
  double least;        // of a p that becomes subnormal or nothing, relative to the largest p
};

struct RowBounds {
  double score;  // of a score z, absolute
  double value;  // of the sum of p v, relative to sum p |v|, beside what the scores cause
  double sum;    // of the sum of p, relative, beside what the scores cause
  double least;  // as above
  double lse;
};

constexpr double kOfFp32 = 1.0 / (1 << 21);  // of a sum of products in fp32
constexpr double kOfPrologue = 1.0 / (1 << 22);  // of what a prologue adds up in fp32, relative to what cancels there

ATTUNE_CHECK_BOTH bool is_finite(double x) { return x - x == 0; }

ATTUNE_CHECK_BOTH RowBounds bounds_of_row(const BoundTerms& terms, double z_abs, double z_lost, double max_logit,
                                          double lse, long long num_visible) {
  const double largest = is_finite(max_logit) ? fabs(max_logit) : 0.0;
  const double sums = (16 + 2 * sqrt(static_cast<double>(num_visible))) / (1 << 24);
  const double log_sum = is_finite(lse) ? fabs(lse) : 0.0;
  RowBounds b;
  b.score = z_abs * (kOfFp32 + terms.of_products) + (terms.additive + largest) * kOfFp32 +
            z_lost * kOfPrologue;
  b.value = sums + terms.of_p + terms.of_values;
  b.sum = sums + terms.of_sum;
  b.least = terms.least;
  b.lse = b.score + b.sum + log_sum / (1 << 22);
  return b;
}

// Of one channel of out = numerator / sum. A score that is off by e moves its probability by a factor of exp(e), and
// both by no more than this.
ATTUNE_CHECK_BOTH double bound_of_out(const RowBounds& b, double out, double pv_abs, double pv_lost, double v_abs,
                                      double largest_p) {
  const double from_scores = 0.5 * expm1(2 * b.score);
  return pv_abs * (b.value + from_scores) + pv_lost * kOfPrologue + v_abs * b.least * largest_p +
         fabs(out) * (b.sum + from_scores) + 1e-36;
}

// What the bounds of one gradient have in common (docs/semantics.md, "Precision and determinism").
struct GradientTerms {
  double of_products;  // error of the minuend and subtrahend of a term
  double of_terms;     // of the sum of the terms, with the rounding of p or dx
  double additive;     // as above
  double least;        // of a p or dx that becomes subnormal or nothing, absolute
};

// Of one element, by the sums that reference::Gradient has of it.
ATTUNE_CHECK_BOTH double bound_of_gradient(const GradientTerms& terms, double sum_terms, double sum_parts,
                                                  double sum_scores, double sum_factors) {
  const double of_scores = (sum_scores + terms.additive * sum_terms) * kOfFp32;
  return sum_parts * terms.of_products + sum_terms * terms.of_terms + of_scores + sum_factors * terms.least + 1e-36;
}

}  // namespace attune::oracle
