// SPDX-License-Identifier: Apache-2.0
// The two products of selftest/wgmma.cu with K and V as x-packed pages have them: q [64, 64], k [8][KEYS][8] (channels
// in eights), v [KEYS / 16][CHANNELS][16] in bf16, by TMA.
#include "ptx/async_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma_along_k.cuh"
#include "selftest/products.cuh"

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
    ptx::tma_load(at_q, q, barrier, 0, 0, 0, 0);
    ptx::tma_load(at_k, k, barrier, 0, 0, 0, 0, 0);
    ptx::tma_load(at_v, v, barrier, 0, 0, 0, 0, 0);
  }
  __syncthreads();
  ptx::wait_phase(barrier, 0);

  multiply_and_store(
      s, o,
      [&](float (&d)[KEYS / 2], int i) {
        ptx::Wgmma<KEYS, ptx::Type::kBf16>::shared(d, ptx::descriptor_k_major(at_q) + i * ptx::kStepK,
                                                   ptx::descriptor_of_pieces<8 * 128>(at_k) + i * ptx::kStepOfPieces,
                                                     i == 0 ? 0 : 1);
      },
      [&](float (&e)[CHANNELS / 2], const unsigned* p, int i) {
        ptx::WgmmaAlongK<CHANNELS, ptx::Type::kBf16>::registers(
            e, p, ptx::descriptor_of_narrow_rows(at_v) + i * (CHANNELS * 32 >> 4), i == 0 ? 0 : 1);
      });
}
