// SPDX-License-Identifier: Apache-2.0
// The swap-AB kernel: MLA attention of at most 32 query heads, or 16, one token at a time, over packed rows of 656
// bytes; dense or sparse. Four pipeline stages hold packed rows unchanged. The GEMMs are wgmma with A and B swapped:
// codes are converted to the A operand in registers; queries and P are the B operand in shared memory.
//
// Grid: persistent. A work tile is a token and the key tiles that it may see, 64 keys each. Warp roles:
//   2 producer warps        copy rows (mla/producers/bulk_copy.cuh)
//   1 scale unit warp       sets the units of the scales (mla/swap_ab/scale_units.cuh)
//   2 softmax warpgroups    S and P, of every other tile each (mla/swap_ab/softmax.cuh, GEMMs mla/swap_ab/gemms.cuh)
//   1 PV warpgroup          O (mla/swap_ab/pv.cuh) and the epilogue (mla/swap_ab/epilogue.cuh)
//
// mbarriers: full and empty of each stage; full of a tile's row max and units, for each stage; full and empty of P,
// which goes from the softmax warps to the PV warps.
#include "mla/producers/bulk_copy.cuh"
#include "mla/swap_ab/epilogue.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

using SwapAbProducer = BulkCopyProducer<SwapAbConfig, SwapAbSmem>;

__device__ __forceinline__ void init_barriers(const SwapAbSmem& smem) {
  if (threadIdx.x == 32) {
    smem.check() = {};
    for (int stage = 0; stage < SwapAbConfig::kStages; ++stage) {
      ptx::init_barrier(smem.full(stage), SwapAbConfig::kProducerWarps);
      ptx::init_barrier(smem.empty(stage), 4);
      ptx::init_barrier(smem.row_max_full(stage), 4 + 1);
    }
    ptx::init_barrier(smem.p_full(), 4);
    ptx::init_barrier(smem.p_empty(), 4);
    scheduler::init_work_barriers(smem, SwapAbConfig::kWorkReaders);
    ptx::publish_barriers();
  }
  __syncthreads();
}

__device__ __forceinline__ void run_softmax(const WorkTileParams& p, const SwapAbSmem& smem) {
  common::check_stamp<Config::kSparse>(p, static_cast<int>(threadIdx.x) - SwapAbConfig::kProducerThreads,
                                       32 * SwapAbConfig::kSoftmaxWarps, smem.check(), [] { sync_softmax_warps(); });
  SwapAbSoftmax a(p, smem);
  scheduler::run_work_tiles(smem, [&](int slot) {
    a.run(smem.work(slot), smem.head_tile(slot));
    a.publish_row_stats();
    sync_swap_ab_consumers();
    ptx::named_barrier_sync_unaligned(kRowStatsRead, 32 * SwapAbConfig::kConsumerWarps);
  });
}
__device__ __forceinline__ void run_pv(const WorkTileParams& p, const SwapAbSmem& smem) {
  SwapAbPv a(p, smem);
  scheduler::run_work_tiles(smem, [&](int slot) {
    const WorkTile& work = smem.work(slot);
    const int head_tile = smem.head_tile(slot);
    a.run(work, head_tile);
    SwapAbEpilogue(p, smem, work, head_tile).store(a);
  });
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::mla::SwapAbConfig::kThreads, 1)
    attune_mla_swap_ab(const __grid_constant__ attune::kernels::WorkTileParams p) {
  using namespace attune;
  using namespace attune::mla;
  const SwapAbSmem smem(ptx::dynamic_shared());
  const auto first_work = SwapAbProducer::Scheduler::prefetch_first(p);  // issued before the mbarriers are initialised
  init_barriers(smem);
  if (threadIdx.x < SwapAbConfig::kProducerThreads) {
    ptx::warpgroup_reg_dealloc<SwapAbConfig::kProducerRegisters>();
    if (threadIdx.x / 32 == SwapAbConfig::kUnitWarp) {
      ScaleUnitWarp(smem).run();
    } else {
      SwapAbProducer(p, smem).run(first_work);
    }
  } else if (swap_ab_warpgroup() < 2) {
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0 && threadIdx.x == SwapAbConfig::kProducerThreads) scheduler::release_list(p);
    ptx::warpgroup_reg_alloc<SwapAbConfig::kSoftmaxRegisters>();
    run_softmax(p, smem);
  } else {
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    ptx::warpgroup_reg_alloc<SwapAbConfig::kPvRegisters>();
    run_pv(p, smem);
  }
}
