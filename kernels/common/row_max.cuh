// SPDX-License-Identifier: Apache-2.0
// The row max that exponents are taken relative to.
#pragma once

#include "ptx/math.cuh"

namespace attune::common {

// Returns 0 for a row that has seen no key, because -inf - -inf is NaN.
__device__ __forceinline__ float finite_row_max(float max) { return max == -ptx::infinity() ? 0.0f : max; }

}  // namespace attune::common
