// SPDX-License-Identifier: Apache-2.0
// kernels/ptx/math.cuh on the CPU.
#pragma once

namespace attune::ptx {

inline float infinity() { return __uint_as_float(0x7f800000u); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float max_or_nan(float x, float y) { return x > y || std::isnan(x) ? x : y; }

}  // namespace attune::ptx
