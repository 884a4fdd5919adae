// SPDX-License-Identifier: Apache-2.0
// The row max that exponents are taken against.
#pragma once

#include "ptx/math.cuh"

namespace attune::common {

// 0 while a row has seen no key, as -inf - -inf is NaN.
__device__ __forceinline__ float finite_row_max(float max) { return max == -ptx::infinity() ? 0.0f : max; }

}  // namespace attune::common
