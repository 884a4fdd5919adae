// SPDX-License-Identifier: Apache-2.0
#include "reference/tensor.h"

#include <cstring>

#include "reference/reference.h"

namespace attune::reference {

int64_t element_bytes(int32_t dtype) {
  switch (dtype) {
    case ATTUNE_FLOAT8_E4M3:
    case ATTUNE_FLOAT8_E5M2:
    case ATTUNE_INT8:
    case ATTUNE_UINT8:
      return 1;
    case ATTUNE_FLOAT16:
    case ATTUNE_BFLOAT16:
      return 2;
    case ATTUNE_FLOAT32:
    case ATTUNE_INT32:
      return 4;
    case ATTUNE_INT64:
      return 8;
    default:
      return 0;
  }
}

const std::byte* element_at(const attune_tensor& t, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  int axis = 0;
  for (const int64_t i : index) offset += i * t.stride[axis++];
  return static_cast<const std::byte*>(t.data) + offset * element_bytes(t.dtype);
}

double number_at(const attune_tensor& t, std::initializer_list<int64_t> index) {
  return decode_element(static_cast<attune_dtype>(t.dtype), element_at(t, index));
}

int64_t integer_at(const attune_tensor& t, std::initializer_list<int64_t> index) {
  const std::byte* at = element_at(t, index);
  if (t.dtype == ATTUNE_INT64) {
    int64_t value;  // not through double, which holds 53 bits
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  return static_cast<int64_t>(decode_element(static_cast<attune_dtype>(t.dtype), at));
}

std::vector<double> read_strided(int32_t dtype, const std::byte* first, int64_t stride, int64_t count) {
  const int64_t step = stride * element_bytes(dtype);
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] = decode_element(static_cast<attune_dtype>(dtype), first + i * step);
  }
  return values;
}

std::vector<double> Rows::row(int64_t row, int64_t head) const {
  const std::byte* first = t_->rank == 4 ? element_at(*t_, {row / t_->shape[1], row % t_->shape[1], head, 0})
                                         : element_at(*t_, {row, head, 0});
  return read_strided(t_->dtype, first, t_->stride[t_->rank - 1], dim());
}

}  // namespace attune::reference
