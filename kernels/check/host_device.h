// SPDX-License-Identifier: Apache-2.0
// NVRTC compiles the oracle's formulas for the oracle on the GPU, the host's compiler compiles them for reference/.
#pragma once

#ifdef __CUDACC__
#define ATTUNE_CHECK_BOTH __host__ __device__ inline
#else
#include <cmath>
#define ATTUNE_CHECK_BOTH inline
#endif
