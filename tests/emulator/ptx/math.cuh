// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/math.cuh on the CPU.
#pragma once

namespace attune::ptx {

inline float infinity() { return __uint_as_float(0x7f800000u); }
// A GPU's NaN is positive, a CPU's often not; kernels take maxima of the bits.
inline float as_on_device(float x) { return isnan(x) ? __uint_as_float(0x7fffffffu) : x; }
inline float exp2_approx(float x) { return as_on_device(exp2f(x)); }
inline float log2_approx(float x) { return as_on_device(log2f(x)); }
inline float reciprocal_approx(float x) { return as_on_device(1.0f / x); }
inline float sqrt_approx(float x) { return as_on_device(sqrtf(x)); }
inline float max_or_nan(float x, float y) { return x > y || isnan(x) ? x : y; }
inline unsigned max_u16x2(unsigned x, unsigned y) {
  return max(x & 0xffff, y & 0xffff) | max(x >> 16, y >> 16) << 16;
}

}  // namespace attune::ptx
