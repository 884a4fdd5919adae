// SPDX-License-Identifier: Apache-2.0
// QK GEMM and PV GEMM of one warpgroup, with K and V as the kernel in selftest/ loads them: S = Q K^T, and O = P V,
// where P is S rounded, in registers.
#pragma once

#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"

// copy() issues the loads of q, K and V, `bytes` in all, which complete at `barrier`. keys(d, i) issues k-step i (16
// channels) of the QK GEMM; values(e, p, i) k-step i (16 keys) of the PV GEMM. s [64, KEYS], o [64, CHANNELS].
template <class Copy, class Keys, class Values>
__device__ __forceinline__ void multiply_and_store(unsigned barrier, unsigned bytes, float* s, float* o,
                                                   const Copy& copy, const Keys& keys, const Values& values) {
  using namespace attune;
  if (threadIdx.x == 0) {
    ptx::init_barrier(barrier, 1);
    ptx::publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::arrive_expecting(barrier, bytes);
    copy();
  }
  __syncthreads();
  ptx::wait_phase(barrier, 0);
  float d[KEYS / 2];
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) keys(d, i);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::fence_operand(d);
  unsigned p[KEYS / 4];
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) p[i] = ptx::pack_bf16(d[2 * i], d[2 * i + 1]);
  float e[CHANNELS / 2];
  ptx::fence_operand(p);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i) values(e, p + 4 * i, i);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::fence_operand(e);

  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) s[(row + i / 2 % 2 * 8) * KEYS + i / 4 * 8 + column + i % 2] = d[i];
#pragma unroll
  for (int i = 0; i < CHANNELS / 2; ++i) o[(row + i / 2 % 2 * 8) * CHANNELS + i / 4 * 8 + column + i % 2] = e[i];
}
