// SPDX-License-Identifier: Apache-2.0
// Error bounds of one row of attention, from sums that the oracle computes. Host (tests/cases/compare.cpp) and device
// use the same formulas. No standard headers on the device.
#pragma once

#include "check/host_device.h"

namespace attune::oracle {

// Unit errors of a problem. Each is multiplied by one of the oracle's sums.
struct BoundTerms {
  double of_products;  // the error of z, relative to z_abs
  double additive;     // the largest |term| that is added after the softcap
  double of_p;         // the rounding of P, relative
  double of_values;    // the rounding of V, relative
  double of_sum;       // the rounding of the row sum's terms, relative
  double least;        // the error of a P that becomes subnormal or 0, relative to the largest P
};

struct RowBounds {
  double score;  // of a score z, absolute
  double value;  // of the sum of P V, relative to sum P |V|; errors of the scores come on top
  double sum;    // of the sum of P, relative; errors of the scores come on top
  double least;  // as in BoundTerms
  double lse;
};

constexpr double kOfFp32 = 1.0 / (1 << 21);  // a sum of products in fp32
constexpr double kOfPrologue = 1.0 / (1 << 22);  // what a prologue adds up in fp32, relative to what cancels there

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

// The bound of one channel of out = numerator / sum. An error e of a score changes its probability by a factor of at
// most exp(e), and thereby numerator and sum.
ATTUNE_CHECK_BOTH double bound_of_out(const RowBounds& b, double out, double pv_abs, double pv_lost, double v_abs,
                                      double largest_p) {
  const double from_scores = 0.5 * expm1(2 * b.score);
  return pv_abs * (b.value + from_scores) + pv_lost * kOfPrologue + v_abs * b.least * largest_p +
         fabs(out) * (b.sum + from_scores) + 1e-36;
}

// What the bounds of the elements of one gradient share (docs/semantics.md, "Precision and determinism").
struct GradientTerms {
  double of_products;  // the error of the minuend and subtrahend of a term
  double of_terms;     // of the sum of the terms, with the rounding of P or dX
  double additive;     // as in BoundTerms
  double least;        // the error of a P or dX that becomes subnormal or 0, absolute
};

// The bound of one element, from the sums that reference::Gradient has for it.
ATTUNE_CHECK_BOTH double bound_of_gradient(const GradientTerms& terms, double sum_terms, double sum_parts,
                                                  double sum_scores, double sum_factors) {
  const double of_scores = (sum_scores + terms.additive * sum_terms) * kOfFp32;
  return sum_parts * terms.of_products + sum_terms * terms.of_terms + of_scores + sum_factors * terms.least + 1e-36;
}

}  // namespace attune::oracle
