// SPDX-License-Identifier: Apache-2.0
// Prefill attention on e4m3 q, k and v, which enter the tensor cores unchanged. P is rounded to e4m3.
//
// Work tiles, grid, masks, producer and epilogue are those of prefill.cu; mainloop and softmax are in mainloop_fp8.cuh.
// Two warps beside the producers of K and V transpose V (transpose_v.cuh).
//
//   producer:  K0 Q   K1 V0   K2 V1   K3 V2 ..
//   transpose:              V0      V1      V2 ..
//   group 1:       S0 |softmax| S1 PV0 |softmax  O+=PV0| S2 PV1 |softmax  O+=PV1| ..
//   group 2:          S0 |softmax|     S1 PV0 |softmax  O+=PV0| S2 PV1 |softmax ..
//
// A consumer thread has O, PV of a tile and S in 64 registers each (128 channels, 128 keys), and P in 16.
#include "prefill/block.cuh"
#include "prefill/epilogue.cuh"
#include "prefill/mainloop_fp8.cuh"
#include "prefill/producer.cuh"
#include "prefill/transpose_v.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

// The thread's rows are recomputed at each use, because the mainloop has no registers for them.
__device__ __forceinline__ void run_consumer(const WorkTileParams& p, const Smem& smem) {
  const int group = threadIdx.x / 128 - 1;
  open_warp_scheduler(group);
  check_stamp(p, smem);
  MainloopFp8 mainloop(p, smem, group);
  for (; has_work(smem, mainloop.slot()); mainloop.next_work()) {
    Accumulators a;
    mainloop.run(a);
    const int slot = mainloop.slot().stage;
    Rows rows;
    rows.start(p, smem.work(slot), smem.head_tile(slot));
    epilogue(p, smem, slot, rows, a, smem.work(slot).num_splits == 1);
  }
}

}  // namespace attune::prefill

extern "C" __global__ void __launch_bounds__(attune::prefill::Config::kThreads, 1) attune_prefill_fp8(
    const __grid_constant__ attune::kernels::WorkTileParams p, const __grid_constant__ attune::ptx::TensorMap q,
    const __grid_constant__ attune::ptx::TensorMap k, const __grid_constant__ attune::ptx::TensorMap v,
    const __grid_constant__ attune::ptx::TensorMap dense_k, const __grid_constant__ attune::ptx::TensorMap dense_v) {
  using namespace attune;
  using namespace attune::prefill;
  const Smem smem(ptx::dynamic_shared());
  init_barriers(smem);
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  const Maps maps{q, k, v, dense_k, dense_v};
  if (threadIdx.x < 128) {
    ptx::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      Producer(p, maps, smem).run();
    } else if (threadIdx.x < 32 + 32 * Config::kTransposeWarps) {
      VTransposer(smem, static_cast<int>(threadIdx.x) / 32 - 1).run();
    } else {
      Producer(p, maps, smem).run_v();
    }
  } else {
    ptx::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    run_consumer(p, smem);
  }
}
