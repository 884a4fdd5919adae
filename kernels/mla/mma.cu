// SPDX-License-Identifier: Apache-2.0
// MLA attention by mma.sync and cp.async, for GPUs without wgmma: the results of mla/mla.cu, from the same work tiles.
//
//   s_rj = <q_r, k_j>, -inf where r does not see j;  c = scale log2 e
//   m = max(m, max_j s_rj);  r = m when m is 8 powers of two above r (deferred rescale);  p_rj = 2^(c (s_rj - r))
//   l = l 2^(c (r' - r)) + sum_j p_rj;  o = o 2^(c (r' - r)) + sum_j p_rj v_j, v_j the first 512 channels of k_j
//
// Tile: kRows (16, 32 or 64) packed rows x kKeys (32 or 16) keys x all channels. Shared memory has kStages key tiles;
// of packed rows the codes of kStages tiles, and two tiles of bf16. Eight consumer warps, in one group, or in two of 32
// rows each (mma/mainloop.cuh has GEMMs and softmax, mma/epilogue.cuh the epilogue; mma_run_work_tile() below is the
// loop over tiles):
//
//   S:        all rows of the group, a quarter of the channels, all keys or half of them | named barrier of the group
//   softmax:  the quarters of S added up, eight rows a warp                              | named barrier of the group
//   O:        all rows of the group, a range of channels
//
// Four or eight producer warps copy and dequantize (mma/producer.cuh, mma/dequant.cuh). With 64 rows there are none,
// and the consumer warps do it.
//
// Grid: persistent. Work tiles come from the list of scheduler/persistent.cu; mla/combine.cu merges splits.
#include "common/stamp.cuh"
#include "mla/mma/epilogue.cuh"
#include "mla/mma/mainloop.cuh"
#include "mla/mma/producer.cuh"
#include "mla/mma/recompute.cuh"
#include "ptx/atomic.cuh"
#include "ptx/grid.cuh"
#include "scheduler/tile_scheduler.cuh"

namespace attune::mla {

// Takes the next work tile: the one that the current tile names, or the next of the list. Called by all threads.
// Returns false if there is no more.
__device__ __forceinline__ bool mma_next_work(const WorkTileParams& p, MmaStorage& shared, bool first) {
  constexpr int kWorkVectors = sizeof(WorkTile) / 16;
  __syncthreads();  // all threads have read the previous work tile
  if (threadIdx.x < 32) {
    const int num_tiles = p.list->num_work_tiles * p.num_head_tiles, blocks = static_cast<int>(gridDim.x);
    int work = first ? 0 : shared.work.next_work, head_tile = shared.head_tile;
    if (work == 0) {
      // If one round takes all work, the counter is not used. The last arrival resets the counter.
      int tile_idx = first ? static_cast<int>(blockIdx.x) : num_tiles;
      if (!first && num_tiles > blocks) {
        if (threadIdx.x == 0)
          tile_idx = blocks + static_cast<int>(ptx::count_arrival(&p.list->next_tile, num_tiles - 1));
        tile_idx = __shfl_sync(0xffffffffu, tile_idx, 0);
      }
      work = tile_idx / p.num_head_tiles;
      head_tile = tile_idx < num_tiles ? tile_idx - work * p.num_head_tiles : scheduler::kNoMoreWork;
    }
    __syncwarp();
    if (head_tile != scheduler::kNoMoreWork && threadIdx.x < kWorkVectors) {
      const uint4* const from = reinterpret_cast<const uint4*>(p.work_tiles + work);
      reinterpret_cast<uint4*>(&shared.work)[threadIdx.x] = from[threadIdx.x];
    }
    if (threadIdx.x == 0) shared.head_tile = head_tile, shared.kv_head = head_tile * p.heads_of_tile / p.group;
  }
  __syncthreads();
  return shared.head_tile != scheduler::kNoMoreWork;
}

// The mainloop and epilogue of the consumer warps for one work tile.
__device__ __forceinline__ void mma_run_work_tile(const WorkTileParams& p, MmaStorage& shared, int warp) {
  constexpr bool kOverlapDequant = !MmaConfig::kHasProducerWarps && ProblemConfig::kProducer == kernels::kMlaDequant656;
  constexpr bool kGroupsAlternate = !MmaConfig::kHasProducerWarps && !kOverlapDequant;
  MmaProducer producer(p, shared);
  const int begin = producer.begin(), end = producer.end();
  if constexpr (!MmaConfig::kHasProducerWarps) producer.start();
  MmaMainloop a(p, shared, warp);
  const int group = a.group();
  a.start();
  int buffer = 0;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const int start = mma_tile_at(shared.work, i).start;
    const unsigned tile = ptx::shared_address(shared.tiles[0]) + buffer * static_cast<int>(sizeof(shared.tiles[0]));
    if constexpr (MmaConfig::kHasProducerWarps) {
      MmaBarriers::wait_full(buffer);
    } else {
      producer.wait();
      MmaBarriers::sync_consumers();  // the tile has arrived, and all warps have read the previous one
    }
    // One group copies while the other multiplies. Codes are dequantized during the PV GEMM.
    if (kGroupsAlternate && group == 0) producer.advance(i);
    a.qk_gemm(tile);
    MmaBarriers::sync_group(group);  // the partial sums of all slices are stored
    const bool moves = a.softmax(i, start);
    if (ptx::named_barrier_any(MmaBarriers::kGroup + group, MmaConfig::kGroupThreads, moves)) a.rescale();
    if (kGroupsAlternate && group == 1) producer.advance(i);
    const auto multiply = [&](auto overlap) { a.pv_gemm(tile, overlap); };
    if constexpr (kOverlapDequant) {
      producer.advance_overlapped<MmaMainloop::kSteps>(i, multiply);
    } else {
      multiply([](int) {});
    }
    if (MmaConfig::kHasProducerWarps && i + MmaConfig::kTiles < end) MmaBarriers::set_empty(buffer);
    buffer = mma_next(buffer, MmaConfig::kTiles);
  }
  if constexpr (!MmaConfig::kHasProducerWarps) ptx::wait_copies<0>();  // the groups that are left are empty
  a.shuffle_lane();
  mma_finish_rows(p, shared, a);
  const bool recomputes = mma_find_nonfinite(p, shared, a);
  if (shared.work.num_splits > 1) {
    mma_store_partial(p, shared, a);
  } else {
    mma_store_out(p, shared, a);
  }
  if (recomputes) mma_recompute(p, shared);
}

}  // namespace attune::mla

extern "C" __global__ void __launch_bounds__(attune::mla::MmaConfig::kThreads, 1)
    attune_mla_mma(const __grid_constant__ attune::kernels::WorkTileParams p) {
  using namespace attune;
  using namespace attune::mla;
  MmaStorage& shared = *reinterpret_cast<MmaStorage*>(ptx::dynamic_shared());
  if (threadIdx.x == 0) shared.check = {};
  ptx::wait_for_previous_kernels();
  ptx::allow_next_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) scheduler::release_list(p);
  __syncthreads();
  common::check_stamp<ProblemConfig::kSparse>(p, static_cast<int>(threadIdx.x), MmaConfig::kThreads, shared.check,
                                              [] { __syncthreads(); });
  const int warp = mma_uniform(static_cast<int>(threadIdx.x) / 32);
  for (bool first = true; mma_next_work(p, shared, first); first = false) {
    if (MmaConfig::kHasProducerWarps && warp >= MmaConfig::kConsumerWarps) {
      MmaProducer(p, shared).run();
    } else {
      mma_run_work_tile(p, shared, warp);
    }
  }
}
