// SPDX-License-Identifier: Apache-2.0
// Exchanges among the four lanes that share the rows of a wgmma accumulator.
#pragma once

namespace attune::common {

// Transposes a 4 x 4 matrix over four lanes: r[i] of lane t becomes r[t] of lane i.
__device__ __forceinline__ void transpose_quad(unsigned (&r)[4]) {
  const bool odd = threadIdx.x % 2 != 0, upper = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? r[i] : r[i + 1], 1);
    if (odd) {
      r[i] = got;
    } else {
      r[i + 1] = got;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? r[i] : r[i + 2], 2);
    if (upper) {
      r[i] = got;
    } else {
      r[i + 2] = got;
    }
  }
}

}  // namespace attune::common
