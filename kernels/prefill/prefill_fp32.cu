// SPDX-License-Identifier: Apache-2.0
// Prefill attention on fp32 inputs. Each number enters the tensor cores as the sum of three bf16 numbers (bf16x3); the
// error is below 2^-24 of a product. TF32 is not used.
//
// Work tiles, grid, masks and epilogue are those of prefill.cu; mainloop and softmax are in mainloop_fp32.cuh. Four
// producer warps load rows and split them, instead of the TMA (producer_fp32.cuh).
//
// Tiles: 128 rows x 64 keys x the head dims, two consumer warpgroups. If a head dim is above 128: 64 rows and one
// consumer warpgroup.
//
//   producer: K0 Q V0 | K1   V1       | K2    V2
//   group 1:       S0 softmax PV0 | S1 softmax PV1 ..
//   group 2:        S0 softmax PV0 | S1 softmax PV1 ..
//
// Shared memory has q, K and V as three bf16 tiles each. At 128 channels one stage of K and V fits: the next K is
// loaded while both warpgroups read V, the next V while they read K.
#include "prefill/block.cuh"
#include "prefill/epilogue.cuh"
#include "prefill/mainloop_fp32.cuh"
#include "prefill/producer_fp32.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

__device__ __forceinline__ void run_consumer(const WorkTileParams& p, const Smem& smem) {
  check_stamp(p, smem);
  MainloopFp32 mainloop(p, smem, consumer_thread() / 128);
  PipelineState slot;
  while (has_work(smem, slot)) {
    Accumulators a;
    mainloop.run(smem.work(slot.stage), smem.head_tile(slot.stage), a);
    Rows rows;
    rows.start(p, smem.work(slot.stage), smem.head_tile(slot.stage));
    epilogue(p, smem, slot.stage, rows, a, smem.work(slot.stage).num_splits == 1);
    slot.next<kernels::kWorkSlots>();
  }
}

}  // namespace attune::prefill

extern "C" __global__ void __launch_bounds__(attune::prefill::Config::kThreads, 1)
    attune_prefill_fp32(const __grid_constant__ attune::kernels::WorkTileParams p,
                        const __grid_constant__ attune::kernels::Fp32Rows vec4) {
  using namespace attune;
  using namespace attune::prefill;
  const Smem smem(ptx::dynamic_shared());
  init_barriers(smem);
  start_after_previous_kernels(p);
  // Blocks of 256 threads need no register reallocation.
  constexpr bool kShares = Config::kConsumerGroups > 1;
  if (threadIdx.x < 128) {
    if constexpr (kShares) ptx::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    Fp32Producer(p, vec4, smem).run();
    end_after_previous_kernels(p);
  } else {
    if constexpr (kShares) ptx::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    run_consumer(p, smem);
  }
}
