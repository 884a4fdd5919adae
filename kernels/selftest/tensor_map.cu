// SPDX-License-Identifier: Apache-2.0
// Copies one box of a tensor map through shared memory: the tile at (x, y) of a matrix of floats, zeros outside it. x
// must be a multiple of 4 floats (16 bytes); otherwise the copy is an illegal instruction.
#include "selftest/types.h"

struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ inline u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// out [ROWS, COLUMNS]
extern "C" __global__ void __launch_bounds__(128)
    tma_load(const __grid_constant__ TensorMap map, float* out, int x, int y) {
  __shared__ alignas(128) float s_tile[ROWS * COLUMNS];
  __shared__ alignas(8) u64 s_barrier;
  const u32 barrier = shared_address(&s_barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(u32(sizeof(s_tile)))
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(shared_address(s_tile)),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
  }
  __syncthreads();
  u32 done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier)
                 : "memory");
  }
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) out[i] = s_tile[i];
}
