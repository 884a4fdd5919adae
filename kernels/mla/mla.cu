// SPDX-License-Identifier: Apache-2.0
// MLA attention: all query heads share a KV head whose rows of 576 or 512 channels are keys and, by their first 512,
// values; dense over pages or rows, or sparse over lists of slots; rows of 16 bits or of the packed 8-bit formats.
//
// Rows are packed: the tokens of a sequence times the query heads. A work tile is a block of 64 packed rows and the
// tiles of keys that they may see; where attention is sparse, the entries of one token's lists. prefill/schedule.cu
// lists work tiles, longest first, and the blocks of a persistent grid take them one after the other; blocks of rows
// that it cuts along the keys are merged by mla/combine.cu.
//
// Tiles: 64 rows x 64 keys x all channels, two tiles at a time. The first warps bring keys: they have the TMA copy them
// (mla/producers/tma.cuh), gather rows (mla/producers/gather.cuh), or decode them (mla/producers/dequant_shared.cuh;
// mla/producers/dequant_registers.cuh in pairs of blocks): four, but eight that decode in blocks by themselves. The
// last two warpgroups do the math (mla/m64/mainloop.cuh): S of every other tile in 32 registers a thread, and half of
// O's channels in 128.
//
// Decoding takes longer than the math, so two blocks that have neighbouring head tiles, and so the same keys, are a
// cluster: each decodes half of the rows and stores them in both.
//
// Barriers: each tile has one "full" a part of its channels, or two parts of gathered rows, and an "empty" for what is
// in K only and for each half of V; q has both. Work tiles go through three slots the same way.
#include "mla/producers/dequant_registers.cuh"
#include "mla/producers/dequant_shared.cuh"
#include "mla/producers/gather.cuh"
#include "mla/producers/tma.cuh"

#include "mla/m64/epilogue.cuh"
#include "mla/m64/recompute.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

namespace attune::mla {

// At a part of a tile: the copy engine; warps that decode; or threads for their copies and, once, warps for what they
// store beside the tile.
__device__ __forceinline__ constexpr int full_arrivals(int slice) {
  if (Config::kTma) return 1;
  if (Config::kDequant) return Config::kProducerThreads / 32;
  return Config::kProducerThreads + (slice == kMaskSlice ? Config::kProducerThreads / 32 : 0);
}

// All threads that use each other's shared memory.
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
    for (int i = 0; i < kernels::kWorkSlots; ++i) {
      ptx::init_barrier(smem.work_full(i), prefill::TileScheduler<Smem>::kWorkVectors);
      ptx::init_barrier(smem.work_empty(i), Config::kWorkReaders);
    }
    for (int i = 0; i < kernels::kMlaItems; ++i) ptx::init_barrier(smem.item_full(i), 1);
    ptx::init_barrier(smem.q_full(), 1);
    ptx::init_barrier(smem.q_empty(), Config::kMathWarps);
    for (int warp = 0; warp < 4; ++warp) ptx::init_barrier(smem.partial_full(warp), 1);
    ptx::publish_barriers();
  }
  sync_block_or_cluster();
}

// The thread will touch the other block's shared memory no more: said before results are stored, so that what they take
// to arrive is not waited for.
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (Config::kCluster > 1) {
    __syncwarp();
    ptx::arrive_at_cluster_releasing();
  }
}
// Whether no work tile follows the present one; the loaders have asked while its first tile came.
__device__ __forceinline__ bool is_last(const Smem& smem, const TileCounts& counts) {
  const unsigned next = counts.work_tiles() + 1;
  ptx::wait_phase(smem.work_full(slot_of_work(next)), next / kernels::kWorkSlots % 2);
  return __shfl_sync(0xffffffffu, smem.head_tile(slot_of_work(next)), 0) == prefill::kNoMoreWork;
}

// Of the first work tile, by the second group's first warp, so that a loader's warp is not behind the others with its
// rows.
__device__ __forceinline__ void load_first_q(const PrefillParams& p, const Smem& smem, const ptx::TensorMap& q) {
  if (threadIdx.x / 32 != (Config::kProducerThreads + 128) / 32) return;
  ptx::wait_phase(smem.work_full(0), 0);
  const int head_tile = smem.head_tile(0);
  if (head_tile != prefill::kNoMoreWork) load_q(p, smem, q, smem.work(0), head_tile);
}

// The tiles of the present work tile.
__device__ __forceinline__ void mainloop(const PrefillParams& p, const Smem& smem, TileCounts& counts,
                                         Accumulators& a) {
  const WorkTile& work = smem.work(counts.slot());
  const Rows rows{p, work, smem.head_tile(counts.slot())};
  if (math_warpgroup() == 0) {
    Mainloop<0>(p, smem).run(work, rows, counts, a);
  } else {
    Mainloop<1>(p, smem).run(work, rows, counts, a);
  }
}

// Both groups: what is not the tiles is the same code, as what it takes is the fetching of its instructions.
__device__ __forceinline__ void run_math(const PrefillParams& p, const Smem& smem, const ptx::TensorMap& q) {
  load_first_q(p, smem, q);
  schedule::check_stamp<Config::kSparse>(p, static_cast<int>(threadIdx.x) - Config::kProducerThreads,
                                         32 * Config::kMathWarps, smem.check(),
                                         [] { ptx::sync_some(kAllMath, 32 * Config::kMathWarps); });
  Accumulators a;
  for (TileCounts counts;; counts.next_work()) {
    ptx::wait_phase(smem.work_full(counts.slot()), counts.work_tiles() / kernels::kWorkSlots % 2);
    if (__shfl_sync(0xffffffffu, smem.head_tile(counts.slot()), 0) == prefill::kNoMoreWork) {
      if (counts.work_tiles() == 0) cluster_arrive();
      return;
    }
    mainloop(p, smem, counts, a);
    counts.refresh();  // where the work tile lies is computed anew: registers are scarce
    const WorkTile& work = smem.work(counts.slot());
    const int head_tile = __shfl_sync(0xffffffffu, smem.head_tile(counts.slot()), 0);
    const Rows rows{p, work, head_tile};
    if (Config::kCluster > 1 && is_last(smem, counts)) cluster_arrive();
    float rescale[2];
    bool nonfinite[2] = {};
    if (work.num_splits > 1)
      store_partial(p, work, head_tile, a, nonfinite);  // before its statistics, which take a while
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
    attune_mla(const __grid_constant__ attune::kernels::PrefillParams p,
               const __grid_constant__ attune::ptx::TensorMap q, const __grid_constant__ attune::ptx::TensorMap k,
               const __grid_constant__ attune::ptx::TensorMap dense_k) {
  using namespace attune;
  using namespace attune::mla;
  const Smem smem(ptx::dynamic_shared());
  const WorkTileReader::Scheduler::First asked =
      WorkTileReader::Scheduler::ask_first(p);  // while the barriers are prepared
  init_barriers(smem);
  if (threadIdx.x < Config::kProducerThreads) {
    ptx::give_up_registers<Config::kProducerRegisters>();
    if constexpr (Config::kTma) {
      TmaProducer(p, q, k, dense_k, smem).run(asked);
    } else if constexpr (Config::kRegisterStaged) {
      RegisterDequantProducer(p, q, smem).run(asked);
    } else if constexpr (Config::kDequant) {
      SharedDequantProducer(p, q, smem).run(asked);
    } else {
      GatherProducer(p, q, smem).run(asked);
    }
    cluster_arrive();
  } else {
    ptx::wait_for_previous_kernels();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0 && threadIdx.x == Config::kProducerThreads) prefill::pass_list_on(p);
    ptx::take_registers<Config::kMathRegisters>();
    run_math(p, smem, q);
  }
  if constexpr (Config::kCluster > 1) ptx::wait_for_cluster();  // nobody ends whose memory another may still write to
}
