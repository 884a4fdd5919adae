// SPDX-License-Identifier: Apache-2.0
// y = A x + y: tests that the runtime compiles, loads and launches kernels. A is a macro of the specialisation.
#include "selftest/types.h"

struct Params {
  const float* x;  // [n]
  float* y;        // [n]
  i64 n;
};

extern "C" __global__ void __launch_bounds__(256) saxpy(const Params p) {
  const i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.n; i += stride)
    p.y[i] += float(A) * p.x[i];
}
