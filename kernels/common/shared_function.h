// SPDX-License-Identifier: Apache-2.0
// ATTUNE_SHARED_FUNCTION: a function of host and device. Compiled by NVRTC and by the host's compiler.
#pragma once

#ifdef __CUDACC__
#define ATTUNE_SHARED_FUNCTION __host__ __device__ constexpr
#else
#define ATTUNE_SHARED_FUNCTION constexpr
#endif
