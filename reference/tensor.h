// SPDX-License-Identifier: Apache-2.0
// Tensors read one element at a time, and rows of channels, by the functions of kernels/check/, which the oracle on the
// GPU has too.
#pragma once

#include <cstdint>
#include <vector>

#include "attune/attune.h"
#include "check/rows.h"

namespace attune::reference {

using oracle::element_at;
using oracle::element_bytes;
using oracle::integer_at;
using oracle::number_at;
using oracle::present;

std::vector<double> channels(const oracle::Row& row, int64_t count);

// Of the queries, all of whose channels are in q, or the last ones in q_rope.
inline int64_t head_dim_qk(const attune_attention& a) {
  return a.q.shape[a.q.rank - 1] + (present(a.q_rope) ? a.q_rope.shape[a.q_rope.rank - 1] : 0);
}

// q, k or v as rows of heads: [rows, heads, dim], or [batch, seqlen, heads, dim] with rows = batch * seqlen.
class Rows {
 public:
  Rows() = default;
  explicit Rows(const attune_tensor& t) : t_(&t) {}

  explicit operator bool() const { return t_ != nullptr && present(*t_); }
  int32_t dtype() const { return t_->dtype; }
  int64_t count() const { return t_->rank == 4 ? t_->shape[0] * t_->shape[1] : t_->shape[0]; }
  int64_t heads() const { return t_->shape[t_->rank - 2]; }
  int64_t dim() const { return t_->shape[t_->rank - 1]; }
  std::vector<double> row(int64_t row, int64_t head) const {
    return channels(oracle::dense_row(*t_, row, head), dim());
  }

 private:
  const attune_tensor* t_ = nullptr;
};

}  // namespace attune::reference
