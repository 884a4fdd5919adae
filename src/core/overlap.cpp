// SPDX-License-Identifier: Apache-2.0
#include "core/overlap.h"

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "core/tensor.h"

namespace attune {
namespace {

// Bytes from one element of an axis to the next; 0 where the axis has one element.
int64_t byte_stride(const attune_tensor& t, int axis) {
  return t.shape[axis] > 1 ? t.stride[axis] * dtype_size(t.dtype) : 0;
}

// Bytes from the first element to the end of the last, along axes whose stride is no multiple of period (0: all).
int64_t span(const attune_tensor& t, int64_t period) {
  int64_t bytes = dtype_size(t.dtype);
  for (int i = 0; i < t.rank; ++i) {
    const int64_t stride = byte_stride(t, i);
    if (period == 0 || stride % period != 0) bytes += (t.shape[i] - 1) * stride;
  }
  return bytes;
}

// Whether the addresses of a and b, modulo period, lie in two disjoint intervals.
bool apart_modulo(const attune_tensor& a, const attune_tensor& b, int64_t period) {
  const int64_t span_a = span(a, period), span_b = span(b, period);
  if (span_a > period || span_b > period) return false;
  const auto at = [period](const attune_tensor& t) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data) % static_cast<uint64_t>(period));
  };
  const int64_t from_a_to_b = (at(b) - at(a) + period) % period, from_b_to_a = (at(a) - at(b) + period) % period;
  return from_a_to_b >= span_a && from_b_to_a >= span_b;
}

// Whether the stride of some axis is less than the span of the axes inside it. Axes are sorted by stride.
bool overlaps_itself(const attune_tensor& t) {
  bool done[ATTUNE_MAX_RANK] = {};
  int64_t extent = 1;
  while (true) {
    int next = -1;
    for (int i = 0; i < t.rank; ++i) {
      if (!done[i] && t.shape[i] > 1 && (next < 0 || t.stride[i] < t.stride[next])) next = i;
    }
    if (next < 0) return false;
    if (t.stride[next] < extent) return true;
    extent += (t.shape[next] - 1) * t.stride[next];
    done[next] = true;
  }
}

}  // namespace

ByteRange byte_range(const attune_tensor& t) {
  if (!present(t)) return {};
  uint64_t last = 0;  // element
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] <= 0) return {};
    if (t.shape[i] > 1) last += static_cast<uint64_t>(t.shape[i] - 1) * static_cast<uint64_t>(t.stride[i]);
  }
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  return {begin, begin + (last + 1) * static_cast<uint64_t>(dtype_size(t.dtype))};
}

bool may_overlap(const attune_tensor& a, const attune_tensor& b) {
  if (!meet(byte_range(a), byte_range(b))) return false;
  for (const attune_tensor* t : {&a, &b}) {
    for (int i = 0; i < t->rank; ++i) {
      const int64_t period = byte_stride(*t, i);
      if (period > 0 && apart_modulo(a, b, period)) return false;
    }
  }
  return true;
}

bool same_rows(const attune_tensor& out, const attune_tensor& in) {
  if (!present(out) || !present(in) || out.data != in.data || out.rank != in.rank) return false;
  const int last = out.rank - 1;
  if (dtype_size(out.dtype) == dtype_size(in.dtype)) {
    for (int i = 0; i <= last; ++i) {
      if (out.shape[i] != in.shape[i] || byte_stride(out, i) != byte_stride(in, i)) return false;
    }
    return true;
  }
  // Elements of different sizes: contiguous rows at the same addresses that do not overlap at the larger size.
  const attune_tensor& wider = dtype_size(out.dtype) > dtype_size(in.dtype) ? out : in;
  for (int i = 0; i <= last; ++i) {
    if (out.shape[i] != in.shape[i] || (i < last && byte_stride(out, i) != byte_stride(in, i))) return false;
  }
  const bool contiguous = out.shape[last] <= 1 || (out.stride[last] == 1 && in.stride[last] == 1);
  return contiguous && !overlaps_itself(wider);
}

}  // namespace attune
