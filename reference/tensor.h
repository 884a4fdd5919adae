// SPDX-License-Identifier: Apache-2.0
// Tensors read one element at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "attune/attune.h"

namespace attune::reference {

inline bool present(const attune_tensor& t) { return t.dtype != ATTUNE_DTYPE_NONE; }
int64_t element_bytes(int32_t dtype);

// Address of an element; an axis of extent 1 has index 0, so its stride never counts.
const std::byte* element_at(const attune_tensor& t, std::initializer_list<int64_t> index);
double number_at(const attune_tensor& t, std::initializer_list<int64_t> index);
int64_t integer_at(const attune_tensor& t, std::initializer_list<int64_t> index);

// count elements that lie stride elements apart.
std::vector<double> read_strided(int32_t dtype, const std::byte* first, int64_t stride, int64_t count);

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
  std::vector<double> row(int64_t row, int64_t head) const;

 private:
  const attune_tensor* t_ = nullptr;
};

}  // namespace attune::reference
