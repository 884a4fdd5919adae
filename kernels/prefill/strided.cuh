// SPDX-License-Identifier: Apache-2.0
// Offsets of a row's channels, for threads that read rows themselves: fp32 rows may have any strides.
#pragma once

#include "prefill/prefill_params.h"

namespace attune::prefill {

// Element d is at (d / pack) * outer + (d % pack) * inner; with pack 0 at d * inner.
struct Strided {
  int pack;
  long long outer, inner;
  __device__ __forceinline__ static Strided of(const kernels::NewRows& rows) { return {0, 0, rows.dim_stride}; }
  __device__ __forceinline__ static Strided of(const kernels::KvPlane& plane) {
    return {plane.contiguous ? 0 : plane.pack, plane.outer_stride, plane.contiguous ? 1 : plane.inner_stride};
  }
  __device__ __forceinline__ long long offset(int channel) const {
    if (pack == 0) return channel * inner;
    return channel / pack * outer + channel % pack * inner;
  }
};

}  // namespace attune::prefill
