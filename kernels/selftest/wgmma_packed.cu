// SPDX-License-Identifier: Apache-2.0
// The two products of selftest/wgmma.cu with K and V as x-packed pages have them: q [64, 64], k [8][KEYS][8] (channels
// in eights), v [KEYS / 16][CHANNELS][16] in bf16, by TMA.
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma_along_k.cuh"

// s [64, KEYS], o [64, CHANNELS]
extern "C" __global__ void __launch_bounds__(128, 1)
    multiply_packed(const __grid_constant__ attune::ptx::TensorMap q, const __grid_constant__ attune::ptx::TensorMap k,
                    const __grid_constant__ attune::ptx::TensorMap v, float* s, float* o) {
  using namespace attune;
  const unsigned at_q = ptx::shared_address(ptx::dynamic_shared()), at_k = at_q + 64 * 128, at_v = at_k + KEYS * 128,
                 barrier = at_v + CHANNELS * KEYS * 2;
  if (threadIdx.x == 0) {
    ptx::init_barrier(barrier, 1);
    ptx::publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::arrive_expecting(barrier, (64 + KEYS + CHANNELS * KEYS / 64) * 128);
    ptx::copy_box(at_q, q, barrier, 0, 0, 0, 0);
    ptx::copy_box(at_k, k, barrier, 0, 0, 0, 0, 0);
    ptx::copy_box(at_v, v, barrier, 0, 0, 0, 0, 0);
  }
  __syncthreads();
  ptx::wait_phase(barrier, 0);

  float d[KEYS / 2];
  ptx::fence_products();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::Product<KEYS, ptx::Type::kBf16>::shared(d, ptx::descriptor_k_major(at_q) + i * ptx::kStepK,
                                                 ptx::descriptor_of_pieces<8 * 128>(at_k) + i * ptx::kStepOfPieces,
                                                 i == 0 ? 0 : 1);
  }
  ptx::commit_products();
  ptx::wait_products<0>();
  ptx::pin(d);
  unsigned p[KEYS / 4];
#pragma unroll
  for (int i = 0; i < KEYS / 4; ++i) p[i] = ptx::pack_bf16(d[2 * i], d[2 * i + 1]);
  float e[CHANNELS / 2];
  ptx::pin(p);
  ptx::fence_products();
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i) {
    ptx::ProductAlongK<CHANNELS, ptx::Type::kBf16>::registers(
        e, p + 4 * i, ptx::descriptor_of_narrow_rows(at_v) + i * (CHANNELS * 32 >> 4), i == 0 ? 0 : 1);
  }
  ptx::commit_products();
  ptx::wait_products<0>();
  ptx::pin(e);

  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) s[(row + i / 2 % 2 * 8) * KEYS + i / 4 * 8 + column + i % 2] = d[i];
#pragma unroll
  for (int i = 0; i < CHANNELS / 2; ++i) o[(row + i / 2 % 2 * 8) * CHANNELS + i / 4 * 8 + column + i % 2] = e[i];
}
