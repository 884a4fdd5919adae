// SPDX-License-Identifier: Apache-2.0
// MLA attention on M = 64 tiles. All query heads share one KV head. A cached row of 576 or 512 channels is a key; its
// first 512 channels are the value. Dense (paged or contiguous rows) or sparse (lists of slots); rows of 16-bit
// elements or of the packed 8-bit formats.
//
// Rows are packed: M = tokens of a sequence times query heads. A work tile is an M block of 64 packed rows and the key
// tiles that it may see (sparse: the entries of one token's lists). scheduler/persistent.cu lists the work tiles,
// longest first; a persistent grid takes them in that order (scheduler/tile_scheduler.cuh). mla/combine.cu merges M
// blocks that are split along the keys.
//
// Tile: 64 rows x 64 keys x all channels, two pipeline stages. Warp roles:
//   producers      TMA boxes (mla/producers/tma.cuh), gathered rows (gather.cuh), or dequantized rows
//                  (dequant_shared.cuh; dequant_registers.cuh in clusters): 4 warps; 8 that dequantize without a
//                  cluster
//   2 warpgroups   consumers: mainloop (mla/m64/mainloop.cuh), softmax (softmax.cuh), epilogue (epilogue.cuh); S of
//                  every other tile, 32 registers a thread, and half of O's channels, 128 registers
//
// Dequantization takes longer than the GEMMs. So two blocks with neighbouring head tiles, which read the same keys,
// form a cluster: each dequantizes half of the rows and stores them in both.
//
// mbarriers: each stage has one full for each channel slice (gathered rows: for each half of V), and three empty: one
// for the channels that only K has and one for each half of V. q has one full and one empty. Work tiles go through a
// ring of three slots.
#include "mla/producers/dequant_registers.cuh"
#include "mla/producers/dequant_shared.cuh"
#include "mla/producers/gather.cuh"
#include "mla/producers/tma.cuh"

#include "mla/m64/epilogue.cuh"
#include "mla/m64/recompute.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

// Arrivals at a slice's full barrier: one of the TMA; or one of each dequant warp; or one of each thread, for its
// cp.async copies, plus one of each warp, for the mask.
__device__ __forceinline__ constexpr int full_arrivals(int slice) {
  if (Config::kTma) return 1;
  if (Config::kDequant) return Config::kProducerThreads / 32;
  return Config::kProducerThreads + (slice == kMaskSlice ? Config::kProducerThreads / 32 : 0);
}

// Synchronises all threads that use each other's shared memory.
__device__ __forceinline__ void sync_block_or_cluster() {
  if constexpr (Config::kCluster == 1) {
    __syncthreads();
  } else {
    ptx::cluster_barrier();
  }
}

__device__ __forceinline__ void init_barriers(const Smem& smem) {
  if (threadIdx.x == 64) {
    smem.check() = {};
    for (int stage = 0; stage < Config::kStages; ++stage) {
      for (int slice = 0; slice < kSlices; ++slice) ptx::init_barrier(smem.k_full(stage, slice), full_arrivals(slice));
      for (int half = 0; half < 3; ++half) ptx::init_barrier(smem.k_empty(stage, half), 4 * Config::kCluster);
    }
    scheduler::init_work_barriers(smem, Config::kWorkReaders);
    scheduler::init_tile_idx_barriers(smem);
    ptx::init_barrier(smem.q_full(), 1);
    ptx::init_barrier(smem.q_empty(), Config::kConsumerWarps);
    for (int warp = 0; warp < 4; ++warp) ptx::init_barrier(smem.partial_full(warp), 1);
    ptx::publish_barriers();
  }
  sync_block_or_cluster();
}

// Cluster arrive: this thread no longer accesses the other block's shared memory. It comes before the output is stored,
// because the release would wait for those stores.
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (Config::kCluster > 1) {
    __syncwarp();
    ptx::arrive_at_cluster();
  }
}
// Whether no work tile follows. The producers asked for the next one while the first tile was in flight.
__device__ __forceinline__ bool is_last(const Smem& smem, const TileCounts& counts) {
  const unsigned next = counts.work_tiles() + 1;
  ptx::wait_phase(smem.work_full(slot_of_work(next)), next / kernels::kWorkSlots % 2);
  return __shfl_sync(0xffffffffu, smem.head_tile(slot_of_work(next)), 0) == scheduler::kNoMoreWork;
}

// Loads q of the first work tile. A consumer warp does it, so that no producer warp gets late with its rows.
__device__ __forceinline__ void load_first_q(const WorkTileParams& p, const Smem& smem, const QueryMaps& q) {
  if (threadIdx.x / 32 != (Config::kProducerThreads + 128) / 32) return;
  ptx::wait_phase(smem.work_full(0), 0);
  const int head_tile = smem.head_tile(0);
  if (head_tile != scheduler::kNoMoreWork) load_q(p, smem, q, smem.work(0), head_tile);
}

// Runs the mainloop of the current work tile.
__device__ __forceinline__ void mainloop(const WorkTileParams& p, const Smem& smem, TileCounts& counts,
                                         Accumulators& a) {
  const WorkTile& work = smem.work(counts.slot());
  const Rows rows{p, work, smem.head_tile(counts.slot())};
  if (consumer_warpgroup() == 0) {
    Mainloop<0>(p, smem).run(work, rows, counts, a);
  } else {
    Mainloop<1>(p, smem).run(work, rows, counts, a);
  }
}

// Both warpgroups run the same code of the epilogue, because its time is the fetch of its instructions.
__device__ __forceinline__ void run_consumer(const WorkTileParams& p, const Smem& smem, const QueryMaps& q) {
  load_first_q(p, smem, q);
  common::check_stamp<Config::kSparse>(p, static_cast<int>(threadIdx.x) - Config::kProducerThreads,
                                       32 * Config::kConsumerWarps, smem.check(),
                                       [] { ptx::named_barrier_sync(kAllConsumers, 32 * Config::kConsumerWarps); });
  Accumulators a;
  for (TileCounts counts;; counts.next_work()) {
    ptx::wait_phase(smem.work_full(counts.slot()), counts.work_tiles() / kernels::kWorkSlots % 2);
    if (__shfl_sync(0xffffffffu, smem.head_tile(counts.slot()), 0) == scheduler::kNoMoreWork) {
      if (counts.work_tiles() == 0) cluster_arrive();
      return;
    }
    mainloop(p, smem, counts, a);
    counts.refresh();  // recomputes the slot's address: registers are scarce
    const WorkTile& work = smem.work(counts.slot());
    const int head_tile = __shfl_sync(0xffffffffu, smem.head_tile(counts.slot()), 0);
    const Rows rows{p, work, head_tile};
    if (Config::kCluster > 1 && is_last(smem, counts)) cluster_arrive();
    float rescale[2];
    bool nonfinite[2] = {};
    if (work.num_splits > 1)
      store_partial(p, work, head_tile, a, nonfinite);  // before the row stats, which take a while
    finalize_softmax(smem, p.scale * kLog2e, a, rescale);
    const RecomputeNonfinite recompute(rows, a, work.num_splits > 1, nonfinite);
    if (work.num_splits == 1) {
      store_out(p, work, rows, a, rescale);
    } else {
      store_partial_stats(p, work, head_tile, a, rescale);
    }
    __syncwarp();
    recompute(p, work, head_tile, rows);
    __syncwarp();
    counts.refresh();
    if (threadIdx.x % 32 == 0) ptx::arrive(smem.work_empty(counts.slot()));
  }
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::mla::Config::kThreads, 1)
    attune_mla(const __grid_constant__ attune::kernels::WorkTileParams p,
               const __grid_constant__ attune::ptx::TensorMap latent_q,
               const __grid_constant__ attune::ptx::TensorMap rope_q, const __grid_constant__ attune::ptx::TensorMap k,
               const __grid_constant__ attune::ptx::TensorMap dense_k) {
  using namespace attune;
  using namespace attune::mla;
  const QueryMaps q{latent_q, rope_q};
  const Smem smem(ptx::dynamic_shared());
  const auto first_work = WorkTileReader::Scheduler::prefetch_first(p);  // issued before the mbarriers are initialised
  init_barriers(smem);
  if (threadIdx.x < Config::kProducerThreads) {
    ptx::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if constexpr (Config::kTma) {
      TmaProducer(p, q, k, dense_k, smem).run(first_work);
    } else if constexpr (Config::kRegisterStaged) {
      RegisterDequantProducer(p, q, smem).run(first_work);
    } else if constexpr (Config::kDequant) {
      SharedDequantProducer(p, q, smem).run(first_work);
    } else {
      GatherProducer(p, q, smem).run(first_work);
    }
    cluster_arrive();
  } else {
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0 && threadIdx.x == Config::kProducerThreads) scheduler::release_list(p);
    ptx::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    run_consumer(p, smem, q);
  }
  if constexpr (Config::kCluster > 1)
    ptx::wait_for_cluster();  // a block must not exit while others write to its shared memory
}
