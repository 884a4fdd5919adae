// SPDX-License-Identifier: Apache-2.0
// Quantisation to 8-bit caches, with the same bits as the CPU backend (docs/semantics.md, "Caches"). By element, so
// that kernels can have any layout of rows over threads:
//
//   float scale = token_scale(dtype, amax);              // per token and head; amax: largest magnitude of the row
//   const Divider over(scale);                           // fixed scales are used the same way
//   codes = encode_pair(dtype, over(x0), over(x1));      // common/run.cuh; or encode_run
//
// The packed formats of MLA: common/mla_codec.cuh.
#pragma once

#include "common/run.cuh"
#include "ptx/math.cuh"

namespace attune::common {

// The larger magnitude; NaN is ignored.
__device__ __forceinline__ float larger_magnitude(float amax, float x) { return fmaxf(amax, fabsf(x)); }

// An infinity counts as the largest float.
__device__ __forceinline__ float finite_amax(float amax) { return fminf(amax, __uint_as_float(0x7f7fffffu)); }

__device__ __forceinline__ float largest_code(int dtype) {
  return dtype == kInt8 ? 127.0f : dtype == kE4m3 ? 448.0f : 57344.0f;
}

// 2^ceil(log2(x)), exactly, for a normal number above 0.
__device__ __forceinline__ float power_of_two_at_least(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0x7f800000u);
}

// The scale of a row whose largest magnitude is amax (from larger_magnitude); of a row of zeros it is 1, or the
// smallest power of two.
__device__ __forceinline__ float token_scale(int dtype, float amax, bool power_of_two = false) {
  if (power_of_two) return power_of_two_at_least(__fdiv_rn(fmaxf(finite_amax(amax), 1e-4f), largest_code(dtype)));
  const float scale = __fdiv_rn(finite_amax(amax), largest_code(dtype));
  return scale == 0.0f ? 1.0f : scale;
}

// x / scale to nearest even, as the CPU divides: a multiplication by the reciprocal and one Newton step with an exact
// remainder. A scale far from 1, and x with it, is first multiplied by a power of two, so that no remainder that
// matters to 8 bits is rounded. Quotients so large or small that x leaves fp32's range saturate, or are 0, in any case.
class Divider {
 public:
  __device__ __forceinline__ explicit Divider(float scale) {
    const float magnitude = fabsf(scale);
    move_ = magnitude < 0x1p-60f ? 0x1p80f : magnitude > 0x1p60f ? 0x1p-80f : 1.0f;
    scale_ = scale * move_;
    reciprocal_ = __frcp_rn(scale_);
  }
  __device__ __forceinline__ float operator()(float x) const { return quotient(x * move_); }
  // Divides several numbers, with one check of the factor.
  template <int kCount>
  __device__ __forceinline__ void divide(float (&x)[kCount]) const {
    if (move_ != 1.0f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] *= move_;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = quotient(x[i]);
  }
  // The same for numbers that are NaN or at most amax: only if amax is infinite do they need the checks.
  template <int kCount>
  __device__ __forceinline__ void divide(float (&x)[kCount], float amax) const {
    if (move_ != 1.0f || amax > __uint_as_float(0x7f7fffffu)) return divide(x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = corrected(x[i], x[i] * reciprocal_);
  }

 private:
  // The remainder is subtracted, not added, so that -0 stays -0.
  __device__ __forceinline__ float corrected(float x, float q) const {
    return fmaf(fmaf(q, scale_, -x), -reciprocal_, q);
  }
  __device__ __forceinline__ float quotient(float x) const {
    const float q = x * reciprocal_;
    const float exact = corrected(x, q);
    return exact == exact ? exact : q;  // infinity: the remainder is NaN
  }
  float scale_, reciprocal_, move_;
};

}  // namespace attune::common
