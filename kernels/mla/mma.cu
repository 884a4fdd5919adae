// SPDX-License-Identifier: Apache-2.0
// MLA attention by mma.sync and cp.async, for GPUs without wgmma: what mla/mla.cu computes, over the same work tiles.
//
//   s_rj = <q_r, k_j>, -inf where r does not see j;  c = scale log2 e
//   m = max(m, max_j s_rj);  r follows m when it is 8 powers of two behind;  p_rj = 2^(c (s_rj - r))
//   l = l 2^(c (r' - r)) + sum_j p_rj;  o = o 2^(c (r' - r)) + sum_j p_rj v_j, v_j the first 512 channels of k_j
//
// Tile: kRows (16, 32 or 64) packed rows x kKeys (32 or 16) keys x all channels; kStages key tiles in shared memory, or
// of packed rows their codes, and two tiles of bf16. Eight warps multiply, in one group or two of 32 rows each:
//
//   S:        all rows of the group, a quarter of the channels, all keys or half of them | barrier of the group
//   softmax:  sums of S, of eight rows                                                   | barrier of the group
//   O:        all rows of the group, some channels
//
// Four or eight more warps copy and decode; with 64 rows there are none, and each group does its part.
// A persistent grid takes the work tiles that scheduler/persistent.cu lists; mla/combine.cu merges splits.
#include "common/stamp.cuh"
#include "mla/mma/epilogue.cuh"
#include "mla/mma/mainloop.cuh"
#include "mla/mma/producer.cuh"
#include "mla/mma/recompute.cuh"
#include "ptx/atomic.cuh"
#include "ptx/grid.cuh"
#include "scheduler/tile_scheduler.cuh"

namespace attune::mla {

// Takes the next work tile: the one that the last one names, or the next of the list. By all threads; false: no more.
__device__ __forceinline__ bool mma_next_work(const WorkTileParams& p, MmaStorage& shared, bool first) {
  constexpr int kWorkVectors = sizeof(WorkTile) / 16;
  __syncthreads();  // nobody reads the last one any more
  if (threadIdx.x < 32) {
    const int num_items = p.list->num_work_tiles * p.num_head_tiles, blocks = static_cast<int>(gridDim.x);
    int work = first ? 0 : shared.work.next_work, head_tile = shared.head_tile;
    if (work == 0) {
      // Where one round takes all, nothing is counted; whoever counts last resets the counter.
      int item = first ? static_cast<int>(blockIdx.x) : num_items;
      if (!first && num_items > blocks) {
        if (threadIdx.x == 0) item = blocks + static_cast<int>(ptx::count_arrival(&p.list->next_tile, num_items - 1));
        item = __shfl_sync(0xffffffffu, item, 0);
      }
      work = item / p.num_head_tiles;
      head_tile = item < num_items ? item - work * p.num_head_tiles : scheduler::kNoMoreWork;
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

// What the warps of the products do with a work tile.
__device__ __forceinline__ void mma_attend(const WorkTileParams& p, MmaStorage& shared, int warp) {
  constexpr bool kDecodesBeside = !MmaConfig::kHasCopiers && ProblemConfig::kProducer == kernels::kMlaDequant656;
  constexpr bool kTakesTurns = !MmaConfig::kHasCopiers && !kDecodesBeside;
  MmaProducer producer(p, shared);
  const int begin = producer.begin(), end = producer.end();
  if constexpr (!MmaConfig::kHasCopiers) producer.start();
  MmaMainloop a(p, shared, warp);
  const int group = a.group();
  a.start();
  int buffer = 0;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const int start = mma_tile_at(shared.work, i).start;
    const unsigned tile = ptx::shared_address(shared.tiles[0]) + buffer * static_cast<int>(sizeof(shared.tiles[0]));
    if constexpr (MmaConfig::kHasCopiers) {
      MmaBarriers::wait_full(buffer);
    } else {
      producer.wait();
      MmaBarriers::sync_consumers();  // the tile is there, and all have read the one before
    }
    // One group copies while the other multiplies; codes are decoded beside P V.
    if (kTakesTurns && group == 0) producer.go_on(i);
    a.qk_gemm(tile);
    MmaBarriers::sync_group(group);  // the sums of all slices
    const bool moves = a.softmax(i, start);
    if (ptx::named_barrier_any(MmaBarriers::kGroup + group, MmaConfig::kGroupThreads, moves)) a.rescale();
    if (kTakesTurns && group == 1) producer.go_on(i);
    const auto multiply = [&](auto between) { a.pv_gemm(tile, between); };
    if constexpr (kDecodesBeside) {
      producer.go_on_beside<MmaMainloop::kSteps>(i, multiply);
    } else {
      multiply([](int) {});
    }
    if (MmaConfig::kHasCopiers && i + MmaConfig::kTiles < end) MmaBarriers::set_empty(buffer);
    buffer = mma_next(buffer, MmaConfig::kTiles);
  }
  if constexpr (!MmaConfig::kHasCopiers) ptx::wait_copies<0>();  // groups without copies
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
    if (MmaConfig::kHasCopiers && warp >= MmaConfig::kConsumerWarps) {
      MmaProducer(p, shared).run();
    } else {
      mma_attend(p, shared, warp);
    }
  }
}
