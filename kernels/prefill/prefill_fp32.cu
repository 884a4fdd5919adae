// SPDX-License-Identifier: Apache-2.0
// Prefill attention on fp32 numbers, which enter the tensor cores as sums of three of bf16: what is left out is below
// 2^-24 of a product. There is no TF32.
//
// Work tiles, rows, masks and the end of a work tile are those of prefill.cu; the math is that of mainloop_fp32.cuh. In
// place of the TMA four warps load rows and split them (producer_fp32.cuh).
//
// Tiles: 128 rows x 64 keys x the head dims, or 64 rows where a row has more than 128 channels: then one math group.
//
//   loaders:  K0 Q V0 | K1   V1       | K2    V2
//   group 1:       S0 softmax PV0 | S1 softmax PV1 ..
//   group 2:        S0 softmax PV0 | S1 softmax PV1 ..
//
// Shared memory: q, K and V three times as bf16. With 128 channels there is room for one stage of K and V: K of the
// next tile comes while both groups have V, V while they have K.
#include "prefill/block.cuh"
#include "prefill/epilogue.cuh"
#include "prefill/mainloop_fp32.cuh"
#include "prefill/producer_fp32.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"

namespace attune::prefill {

__device__ __forceinline__ void run_math(const PrefillParams& p, const Smem& smem) {
  check_stamp(p, smem);
  MainloopFp32 mainloop(p, smem, math_thread() / 128);
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
    attune_prefill_fp32(const __grid_constant__ attune::kernels::PrefillParams p,
                        const __grid_constant__ attune::kernels::Fp32Rows vec4) {
  using namespace attune;
  using namespace attune::prefill;
  const Smem smem(ptx::dynamic_shared());
  init_barriers(smem);
  start_after_previous_kernels(p);
  // Blocks of 256 threads have enough for all.
  constexpr bool kShares = Config::kMathGroups > 1;
  if (threadIdx.x < 128) {
    if constexpr (kShares) ptx::give_up_registers<Config::kProducerRegisters>();
    Fp32Producer producer(p, vec4, smem);
    producer.run();
    end_after_previous_kernels(p);
  } else {
    if constexpr (kShares) ptx::take_registers<Config::kMathRegisters>();
    run_math(p, smem);
  }
}
