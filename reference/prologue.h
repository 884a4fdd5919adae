// SPDX-License-Identifier: Apache-2.0
// What happens to q, k and v of the new tokens before they attend, row by row, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "attune/attune.h"
#include "reference/tensor.h"

namespace attune::reference {

// Which token a row belongs to.
struct Token {
  int64_t sequence = 0;
  int64_t row = -1;      // entry of prologue.positions; -1: none
  int64_t position = 0;  // absolute, in its sequence
};

class Prologue {
 public:
  // magnitudes: of all factors and terms, so that nothing cancels. What fp32 loses is relative to these.
  explicit Prologue(const attune_prologue& p, bool magnitudes = false) : p_(p), magnitudes_(magnitudes) {}

  // Whether something may cancel.
  bool has_sums() const;

  // One head of one token, as it attends.
  std::vector<double> query(const Rows& q, int64_t row, int64_t head, const Token& token) const;
  std::vector<double> key(const Rows& k, int64_t row, int64_t head, const Token& token) const;
  std::vector<double> value(const Rows& v, int64_t row, int64_t head, const Token& token) const;

 private:
  std::vector<double> dequantised(const Rows& rows, int64_t row, int64_t head, int64_t which) const;
  void add_bias(const attune_tensor& bias, int64_t head, std::vector<double>& x) const;
  void multiply_ia3(const attune_tensor& weights, int64_t sequence, int64_t head, std::vector<double>& x) const;
  int64_t mrope_component(int64_t pair) const;
  int64_t rope_position(const Token& token, int64_t pair) const;
  void rotate(const Token& token, std::vector<double>& x) const;
  double logn(int64_t position) const;

  double sized(double x) const { return magnitudes_ ? std::fabs(x) : x; }

  const attune_prologue& p_;
  bool magnitudes_;
};

}  // namespace attune::reference
