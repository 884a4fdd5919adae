// SPDX-License-Identifier: Apache-2.0
// A softmax over logits with one more logit, the sink, in the denominator only.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

namespace attune::reference {

class Softmax {
 public:
  // Logits of -inf count for nothing. sink -inf: none. NaN spreads, but +inf is the maximum beside it, too.
  Softmax(const std::vector<double>& logits, double sink) {
    for (const double z : logits) {
      if (z == kInfinity || (!(z <= max_) && !std::isnan(max_))) max_ = z;  // a NaN is taken, and stays
      if (max_ == kInfinity) break;
    }
    for (const double z : logits) {
      if (!ignores(z)) sum_ += std::exp(z - max_);
    }
    lse_ = empty() ? max_ : max_ + std::log(sum_);
    // 1 / (1 + exp(sink - lse)) is right for every sink, infinite ones included, and never overflows into NaN.
    attention_ = empty() ? 0.0 : 1.0 / (1.0 + std::exp(sink - lse_));
  }

  bool ignores(double logit) const { return logit == -kInfinity; }
  bool empty() const { return max_ == -kInfinity; }
  double max() const { return max_; }
  double lse() const { return lse_; }  // without the sink
  double probability(double logit) const { return std::exp(logit - max_) / sum_ * attention_; }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double max_ = -kInfinity, sum_ = 0, lse_ = 0;
  double attention_ = 1;  // what the sink leaves to the keys
};

}  // namespace attune::reference
