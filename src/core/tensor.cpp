// SPDX-License-Identifier: Apache-2.0
#include "core/tensor.h"

#include <algorithm>
#include <array>
#include <limits>

#include "core/dtype.h"

namespace attune {
namespace {

std::string list_dtypes(std::initializer_list<int32_t> dtypes) {
  std::string s;
  for (int32_t d : dtypes) s += (s.empty() ? "" : ", ") + std::string(dtype_name(d));
  return s;
}

std::string shape_text(const attune_tensor& t) {
  std::string s = "[";
  for (int i = 0; i < t.rank; ++i) s += (i == 0 ? "" : ", ") + std::to_string(t.shape[i]);
  return s + "]";
}

}  // namespace

void check_tensor(const char* name, const attune_tensor& t, std::initializer_list<int32_t> dtypes,
                  std::initializer_list<int> ranks, Data data) {
  if (!present(t)) fail(ATTUNE_INVALID_ARGUMENT, name, " is absent, but it is needed");
  if (std::find(dtypes.begin(), dtypes.end(), t.dtype) == dtypes.end()) {
    fail(ATTUNE_INVALID_ARGUMENT, name, ".dtype is ", dtype_name(t.dtype), " (", t.dtype,
         "); allowed: ", list_dtypes(dtypes));
  }
  if (std::find(ranks.begin(), ranks.end(), t.rank) == ranks.end()) {
    std::string allowed;
    for (int r : ranks) allowed += (allowed.empty() ? "" : " or ") + std::to_string(r);
    fail(ATTUNE_INVALID_ARGUMENT, name, ".rank is ", t.rank, "; it must be ", allowed);
  }
  const int64_t size = dtype_size(t.dtype);
  // The whole extent must fit 62 bits of bytes, so that every later offset is exact in int64.
  unsigned __int128 last = 0;
  unsigned __int128 count = 1;
  bool empty = false;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] < 0) fail(ATTUNE_INVALID_ARGUMENT, name, ".shape[", i, "] is ", t.shape[i], "; it must be >= 0");
    if (t.shape[i] == 0) empty = true;
    if (t.shape[i] > 1) {
      if (t.stride[i] < 0)
        fail(ATTUNE_INVALID_ARGUMENT, name, ".stride[", i, "] is ", t.stride[i], "; it must be >= 0");
      last += static_cast<unsigned __int128>(t.shape[i] - 1) * static_cast<uint64_t>(t.stride[i]);
    }
    constexpr unsigned __int128 kMost = static_cast<unsigned __int128>(1) << 62;
    if (last > kMost || count > kMost)
      fail(ATTUNE_INVALID_ARGUMENT, name, ": shape ", shape_text(t), " and strides exceed 2^62 elements");
    count *= static_cast<uint64_t>(std::max<int64_t>(t.shape[i], 1));
  }
  if ((last + 1) * static_cast<uint64_t>(size) > (static_cast<unsigned __int128>(1) << 62) ||
      count > (static_cast<unsigned __int128>(1) << 60)) {
    fail(ATTUNE_INVALID_ARGUMENT, name, ": shape ", shape_text(t), " and strides exceed 2^62 bytes");
  }
  if (data == Data::kRequired && !empty && t.data == nullptr)
    fail(ATTUNE_INVALID_ARGUMENT, name, ".data is null, but ", name, " has shape ", shape_text(t));
  if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size) != 0) {
    fail(ATTUNE_INVALID_ARGUMENT, name, ".data is ", reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size),
         " bytes beyond a multiple of ", size, "; it must be aligned to its element of ", size, " bytes");
  }
}

void check_extent(const char* name, const attune_tensor& t, int axis, int64_t expected, const char* what) {
  if (t.shape[axis] != expected) {
    fail(ATTUNE_INVALID_ARGUMENT, name, ".shape[", axis, "] is ", t.shape[axis], "; it must be ", expected, " (", what,
         "); ", name, " has shape ", shape_text(t));
  }
}

void check_flag(const char* name, int32_t value) {
  require(value == 0 || value == 1, name, " is ", value, "; it must be 0 or 1");
}

void check_no_overlap(const char* name, const attune_tensor& t) {
  std::array<int, ATTUNE_MAX_RANK> axes{};  // axes with more than one element, sorted by stride
  int n = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return;
    if (t.shape[i] == 1) continue;
    int at = n++;
    for (; at > 0 && t.stride[axes[static_cast<size_t>(at) - 1]] > t.stride[i]; --at) {
      axes[static_cast<size_t>(at)] = axes[static_cast<size_t>(at) - 1];
    }
    axes[static_cast<size_t>(at)] = i;
  }
  int64_t extent = 1;  // elements that the inner axes span
  for (int i = 0; i < n; ++i) {
    const int a = axes[static_cast<size_t>(i)];
    if (t.stride[a] < extent) {
      fail(ATTUNE_INVALID_ARGUMENT, name, ".stride[", a, "] is ", t.stride[a],
           "; an output must not overlap itself, so at least ", extent);
    }
    extent += (t.shape[a] - 1) * t.stride[a];
  }
}

RowView row_view(const attune_tensor& t, bool has_dim) {
  RowView v;
  if (!present(t)) return v;
  const int lead = t.rank - (has_dim ? 2 : 1);  // axes before heads: rows, or batch and rows
  auto stride = [&](int axis) { return t.shape[axis] > 1 ? t.stride[axis] : 0; };
  v.data = static_cast<std::byte*>(t.data);
  v.dtype = t.dtype;
  v.element_size = static_cast<int32_t>(dtype_size(t.dtype));
  v.head_stride = stride(lead);
  v.dim_stride = has_dim ? (t.shape[lead + 1] > 1 ? t.stride[lead + 1] : 1) : 0;
  v.row_stride = stride(lead - 1);
  v.rows = t.shape[lead - 1];
  if (lead == 2) {
    v.rows_per_batch = t.shape[1] > 0 ? t.shape[1] : 1;
    v.batch_stride = stride(0);
    v.rows *= t.shape[0];
  }
  return v;
}

ParamView param_view(const attune_tensor& t) {
  ParamView v;
  if (!present(t)) return v;
  v.data = static_cast<const std::byte*>(t.data);
  v.dtype = t.dtype;
  for (int i = 0; i < t.rank; ++i) {
    const int to = 3 - t.rank + i;
    v.shape[to] = t.shape[i];
    v.stride[to] = t.shape[i] > 1 ? t.stride[i] * dtype_size(t.dtype) : 0;
  }
  return v;
}

float ParamView::operator()(int64_t i, int64_t j, int64_t k) const {
  return load_as_float(dtype, data + i * stride[0] + j * stride[1] + k * stride[2]);
}

IntView int_view(const attune_tensor& t) {
  IntView v;
  if (!present(t)) return v;
  v.data = static_cast<const int32_t*>(t.data);
  v.rows = t.rank == 1 ? 1 : t.shape[0];
  v.cols = t.shape[t.rank - 1];
  v.row_stride = t.rank == 1 ? 0 : t.stride[0];
  v.col_stride = t.stride[t.rank - 1];
  return v;
}

IntView int_vector(const char* name, const attune_tensor& t, int64_t expected, const char* what, Data data) {
  if (!present(t)) return {};
  check_tensor(name, t, {ATTUNE_INT32}, {1}, data);
  if (expected >= 0) check_extent(name, t, 0, expected, what);
  require(expected >= 0 || t.shape[0] >= 1, name, ".shape[0] is ", t.shape[0], "; it must be ", what);
  return int_view(t);
}

const float* read_out_scale(const attune_tensor& out, const attune_tensor& out_scale, Data data) {
  if (!present(out_scale)) return nullptr;
  require(out.dtype == ATTUNE_FLOAT8_E4M3, "out_scale is set, but out is ", dtype_name(out.dtype),
          "; only e4m3 is scaled");
  check_tensor("out_scale", out_scale, {ATTUNE_FLOAT32}, {1}, data);
  check_extent("out_scale", out_scale, 0, 1, "one scale");
  return static_cast<const float*>(out_scale.data);
}

}  // namespace attune
