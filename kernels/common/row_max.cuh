// SPDX-License-Identifier: Apache-2.0
// The row max that exponents are taken relative to.
#pragma once

#include "ptx/math.cuh"

namespace attune::common {

// Returns 0 for a row that has seen no key, because -inf - -inf is NaN.
__device__ __forceinline__ float finite_row_max(float max) { return max == -ptx::infinity() ? 0.0f : max; }

// Whether P = 2^(s scale - max) is far from 1 for the largest score: the product is fused with the difference, and the
// max was rounded. From 2^24 on what lies between the two is a power of two, above 2^31 one that no number holds.
__device__ __forceinline__ bool is_large(float max) { return fabsf(max) >= 0x1p24f && max != -ptx::infinity(); }
// NaN for such a max, 0 for others.
__device__ __forceinline__ float nan_if_large(float max) { return finite_row_max(max) * 0x1p104f * 0.0f; }

}  // namespace attune::common
