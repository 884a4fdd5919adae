// SPDX-License-Identifier: Apache-2.0
// The oracle's formulas are compiled by NVRTC, for the oracle on the GPU, and by the host's compiler, for reference/.
#pragma once

#ifdef __CUDACC__
#define ATTUNE_CHECK_BOTH __host__ __device__ inline
#else
#include <cmath>
#define ATTUNE_CHECK_BOTH inline
#endif
