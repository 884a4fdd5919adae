// SPDX-License-Identifier: Apache-2.0
// The gradients of attention over dense keys by wgmma. Grid: work tiles in the order of tickets. A block has 128
// resident keys, keeps their dk and dv in registers, and streams tiles of queries, each for all query heads of its KV
// head. It adds dq of each tile to sums in global memory, in a fixed order (dq.cuh): the bits are the same in every
// run, whatever the batch is.
//
// If dk and dv of a head do not fit the registers together, each gradient has a separate pass, a launch of this kernel:
// dk and dv as above, and dq by blocks of 128 resident queries, which stream tiles of keys. Then no sum crosses a
// block.
//
// Warpgroup 0: warp 0 is the producer (producer.cuh), the others add dq (dq_writer.cuh). Warpgroups 1 and 2 are the
// consumers (mainloop.cuh, or mainloop_of_gradient.cuh for a pass of one gradient; GEMMs in gemms.cuh, P and dS in
// softmax.cuh; epilogue.cuh). Tile scheduler: a counter of tickets over the list of schedule.cu.
//
// If dq is summed, a block waits for blocks of the same sequence and head. A block takes its work tile from the counter
// when it begins, and those blocks have earlier tickets, so they are running or have ended.
//
// mbarriers: the resident rows and each stage have a full barrier (one arrival and the bytes of the copies); a stage
// also has an empty barrier (one lane of each consumer warp arrives). Named barriers: dS of both warpgroups is in
// shared memory; dq of a tile is there; dq of a tile has been read. A NaN or infinity of the sequence can reach the
// gradient of a row that does not see it as 0 * NaN, so recompute.cu examines the rows of blocks that have one.
#include "backward/dq_writer.cuh"
#include "backward/epilogue.cuh"
#include "backward/mainloop.cuh"
#include "backward/mainloop_of_gradient.cuh"
#include "backward/producer.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace attune::backward {

__device__ __forceinline__ void init_barriers(const Smem& smem) {
  ptx::init_barrier(smem.resident_full(), 1);
  for (int i = 0; i < Config::kQkStages; ++i) {
    ptx::init_barrier(smem.qk_full(i), 1);
    ptx::init_barrier(smem.qk_empty(i), Config::kConsumerWarps);
  }
  for (int i = 0; i < Config::kVdoStages; ++i) {
    ptx::init_barrier(smem.vdo_full(i), 1);
    ptx::init_barrier(smem.vdo_empty(i), Config::kConsumerWarps);
  }
  ptx::publish_barriers();
}

__device__ __forceinline__ void run_consumer(const BackwardParams& p, const Smem& smem) {
  Accumulators a;
#pragma unroll
  for (float& x : a.dqk) x = 0;
#pragma unroll
  for (float& x : a.dv) x = 0;
  {
    // Computed from the list again: a copy from shared memory takes registers that heads of 160 channels do not have.
    const WorkTile work = work_tile_at(p, smem.work_tile_idx());
    if (work.tiles > 0) {
      if constexpr (Config::kWithDqk && Config::kWithDv) {
        run_one_pass(p, smem, work, a);
      } else {
        run_gradient(p, smem, work, a);
      }
    }
  }
  const bool nonfinite = any_nonfinite(a.dqk) || any_nonfinite(a.dv);
  const bool any = ptx::named_barrier_any(kConsumerBarrier, 32 * Config::kConsumerWarps, nonfinite);
  if (threadIdx.x == 128) flag_nonfinite(p, smem.work_tile_idx(), any);
  const WorkTile work = smem.work();  // no register is left to keep it during the mainloop
  if constexpr (Config::kWithDqk)
    store<Config::kHeadDimQk>(p, smem, work, Config::kOfQueries ? p.dq : p.dk, a.dqk, p.scale);
  if constexpr (Config::kWithDv) store<Config::kHeadDimV>(p, smem, work, p.dv, a.dv, 1.0f);
}

}  // namespace attune::backward

extern "C" __global__ void __launch_bounds__(attune::backward::Config::kThreads, 1)
    attune_backward_gradients(const __grid_constant__ attune::kernels::BackwardParams p,
                              const __grid_constant__ attune::ptx::TensorMap resident_qk,
                              const __grid_constant__ attune::ptx::TensorMap resident_vdo,
                              const __grid_constant__ attune::ptx::TensorMap qk,
                              const __grid_constant__ attune::ptx::TensorMap vdo) {
  using namespace attune;
  using namespace attune::backward;
  const Smem smem(ptx::dynamic_shared());
  ptx::wait_for_previous_kernels();
  if (threadIdx.x == 0) {
    const unsigned ticket = Config::kSumsDq ? ptx::add_arrivals(&p.kv_list->next, 1) : blockIdx.x;
    const int idx = work_tile_of_ticket(p, static_cast<int>(ticket));
    init_barriers(smem);
    smem.work_tile_idx() = idx;
    if (idx / resident_heads(p) < resident_list(p)->num_tiles) smem.work() = work_tile_at(p, idx);
  }
  __syncthreads();
  if (smem.work_tile_idx() / resident_heads(p) >= resident_list(p)->num_tiles) return;
  if (threadIdx.x < 128) {
    ptx::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    const WorkTile work = smem.work();
    if (warp == 0) {
      const Maps maps{resident_qk, resident_vdo, qk, vdo};
      Producer(p, maps, smem, work).run();
    } else if constexpr (Config::kSumsDq) {
      DqWriter(p, smem, work, warp - 1).run();
    }
  } else {
    ptx::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    run_consumer(p, smem);
  }
}
