// SPDX-License-Identifier: Apache-2.0
// Checks that gigabytes of guard memory still hold their filler. Each thread checks some words.
#include "check/guard_params.h"

extern "C" __global__ void __launch_bounds__(1024) attune_guard(const attune::oracle::GuardParams* params) {
  const attune::oracle::GuardParams p = *params;
  const long long me = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long all = static_cast<long long>(gridDim.x) * blockDim.x;
  long long first = -1;
  for (long long i = me; i < p.num_words; i += all) {
    if (p.words[i] != p.filler && first < 0) first = i;
  }
  p.first[me] = first;
}
