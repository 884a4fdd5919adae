// SPDX-License-Identifier: Apache-2.0
// For headers that host and device share. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#ifdef __CUDACC__
#define ATTUNE_SHARED_FUNCTION __host__ __device__ constexpr
#else
#define ATTUNE_SHARED_FUNCTION constexpr
#endif

namespace attune::kernels {

ATTUNE_SHARED_FUNCTION int align_up(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace attune::kernels
