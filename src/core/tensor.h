// SPDX-License-Identifier: Apache-2.0
// Checks of user tensors, and the small views that kernels walk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "attune/attune.h"
#include "core/status.h"

namespace attune {

inline bool present(const attune_tensor& t) { return t.dtype != ATTUNE_DTYPE_NONE; }

// Joins two words to a name, such as "cache" and ".k_scale", without the heap: runs, which allocate nothing, check
// their arguments too.
class Name {
 public:
  Name(const char* first, const char* second) {
    for (const char* from : {first, second}) {
      for (; *from != '\0' && size_ + 1 < sizeof(text_); ++from) text_[size_++] = *from;
    }
    text_[size_] = '\0';
  }
  operator const char*() const { return text_; }

 private:
  char text_[64];
  size_t size_ = 0;
};

inline constexpr std::initializer_list<int32_t> kFloats = {ATTUNE_FLOAT32, ATTUNE_FLOAT16, ATTUNE_BFLOAT16};
inline constexpr std::initializer_list<int32_t> kInputs = {ATTUNE_FLOAT32,     ATTUNE_FLOAT16,     ATTUNE_BFLOAT16,
                                                           ATTUNE_FLOAT8_E4M3, ATTUNE_FLOAT8_E5M2, ATTUNE_INT8};

enum class Data { kOptional, kRequired };  // planning looks at shapes only; a run needs the bytes

// Throws unless t has one of the dtypes and ranks, a legal shape and legal strides, and aligned data (where required).
void check_tensor(const char* name, const attune_tensor& t, std::initializer_list<int32_t> dtypes,
                  std::initializer_list<int> ranks, Data data);
// Throws unless t.shape[axis] == expected. what names the source of the expected number ("num_heads_q").
void check_extent(const char* name, const attune_tensor& t, int axis, int64_t expected, const char* what);
void check_flag(const char* name, int32_t value);
// Outputs must not write one element twice.
void check_no_overlap(const char* name, const attune_tensor& t);

inline int64_t num_elements(const attune_tensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.rank; ++i) n *= t.shape[i];
  return n;
}

// Rows of vectors: element (row, head, d). Rows may be nested in batches (rank 4 tensors).
struct RowView {
  std::byte* data = nullptr;
  int32_t dtype = ATTUNE_DTYPE_NONE;
  int32_t element_size = 0;
  int64_t rows = 0;
  int64_t rows_per_batch = 0;                                                 // 0: one flat axis
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0, dim_stride = 0;  // in elements

  explicit operator bool() const { return dtype != ATTUNE_DTYPE_NONE; }
  std::byte* at(int64_t row, int64_t head) const {
    const int64_t base = rows_per_batch == 0
                             ? row * row_stride
                             : (row / rows_per_batch) * batch_stride + (row % rows_per_batch) * row_stride;
    return data + (base + head * head_stride) * element_size;
  }
};
// From a tensor [rows, heads, dim] or [batch, rows, heads, dim]; without the last axis (lse) if !has_dim.
RowView row_view(const attune_tensor& t, bool has_dim = true);

// A float parameter [.., n] with free strides, read element by element.
struct ParamView {
  const std::byte* data = nullptr;
  int32_t dtype = ATTUNE_DTYPE_NONE;
  int64_t shape[3] = {1, 1, 1};
  int64_t stride[3] = {0, 0, 0};  // in bytes, outermost first, right aligned to rank 3

  explicit operator bool() const { return dtype != ATTUNE_DTYPE_NONE; }
  float operator()(int64_t i, int64_t j, int64_t k) const;
  float operator()(int64_t j, int64_t k) const { return (*this)(0, j, k); }
  float operator()(int64_t k) const { return (*this)(0, 0, k); }
};
ParamView param_view(const attune_tensor& t);

// An int32 table [rows, cols] (or [cols]), with free strides.
struct IntView {
  const int32_t* data = nullptr;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0, col_stride = 0;

  explicit operator bool() const { return rows > 0; }
  int32_t operator()(int64_t i, int64_t j) const { return data[i * row_stride + j * col_stride]; }
  int32_t operator()(int64_t j) const { return data[j * col_stride]; }
};
IntView int_view(const attune_tensor& t);
// An optional int32 vector [expected].
IntView int_vector(const char* name, const attune_tensor& t, int64_t expected, const char* what, Data data);
// Null where it is not given. Throws where out is not e4m3.
const float* read_out_scale(const attune_tensor& out, const attune_tensor& out_scale, Data data);

}  // namespace attune
