// SPDX-License-Identifier: Apache-2.0
// The m16 kernel: MLA attention of at most 16 query heads, one token at a time, over cached rows of 16-bit elements;
// dense or sparse. More heads are several M blocks. Unlike mla/mla.cu, it neither pads queries to 64 rows nor keeps
// them in shared memory: three pipeline stages fill shared memory, to hide memory latency. Packed rows: mla/swap_ab.cu.
//
// Grid: persistent. A work tile is a token and the key tiles that it may see, 64 keys each. Two producer warps copy
// them (mla/producers/bulk_copy.cuh). Eight consumer warps (mla/m16/mainloop.cuh has mainloop and softmax,
// mla/m16/gemms.cuh the GEMMs) share each tile: each has eight keys of S and 64 channels of O. The epilogue is
// mla/m16/epilogue.cuh.
//
// mbarriers: full and empty of each stage; full of a tile's row max, and of its P, which every warp needs from all
// others. Row max and P have two buffers: when all warps have arrived at one, all have read the other.
#include "mla/m16/epilogue.cuh"
#include "mla/producers/bulk_copy.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

using M16Producer = BulkCopyProducer<M16Config, M16Smem>;

__device__ __forceinline__ void init_barriers(const M16Smem& smem) {
  if (threadIdx.x == 32) {
    smem.check() = {};
    for (int stage = 0; stage < M16Config::kStages; ++stage) {
      ptx::init_barrier(smem.full(stage), M16Config::kProducerWarps);
      ptx::init_barrier(smem.empty(stage), M16Config::kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::init_barrier(smem.row_max_full(i), M16Config::kConsumerWarps);
      ptx::init_barrier(smem.p_full(i), M16Config::kConsumerWarps);
    }
    scheduler::init_work_barriers(smem, M16Config::kWorkReaders);
    ptx::publish_barriers();
  }
  __syncthreads();
}

__device__ __forceinline__ void run_m16(const WorkTileParams& p, const M16Smem& smem) {
  common::check_stamp<Config::kSparse>(p, static_cast<int>(threadIdx.x) - M16Config::kProducerThreads,
                                       32 * M16Config::kConsumerWarps, smem.check(), [] { sync_m16_consumers(); });
  M16Mainloop a(p, smem);
  scheduler::run_work_tiles(smem, [&](int slot) {
    const WorkTile& work = smem.work(slot);
    a.run(work, smem.head_tile(slot));
    if (work.num_splits > 1)
      m16_store_partial(p, work, smem.head_tile(slot), a);  // before the row sums, which take a while
    a.reduce_row_sum();
    if (work.num_splits > 1) {
      m16_store_partial_stats(p, work, smem.head_tile(slot), a);
    } else {
      m16_store_out(p, work, smem.head_tile(slot), a);
    }
  });
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::mla::M16Config::kThreads, 1)
    attune_mla_m16(const __grid_constant__ attune::kernels::WorkTileParams p) {
  using namespace attune;
  using namespace attune::mla;
  const M16Smem smem(ptx::dynamic_shared());
  const auto first_work = M16Producer::Scheduler::prefetch_first(p);  // issued before the mbarriers are initialised
  init_barriers(smem);
  if (threadIdx.x < M16Config::kProducerThreads) {
    ptx::warpgroup_reg_dealloc<M16Config::kProducerRegisters>();
    M16Producer(p, smem).run(first_work);
  } else {
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0 && threadIdx.x == M16Config::kProducerThreads) scheduler::release_list(p);
    ptx::warpgroup_reg_alloc<M16Config::kConsumerRegisters>();
    run_m16(p, smem);
  }
}
