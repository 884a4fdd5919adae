// SPDX-License-Identifier: Apache-2.0
// The ring through which the first block of a cluster of two sends tile indices to the other block by DSMEM
// (tile_scheduler.cuh).
//
// Smem has kTileIdxSlots and, for entry n, tile_idx(n) and the mbarrier tile_idx_full(n), which takes one arrival.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared.cuh"

namespace attune::scheduler {

// The distance from a shared address to the same offset in the other block.
template <class Smem>
__device__ __forceinline__ unsigned to_other_block(const Smem& smem) {
  return ptx::shared_in_block(smem.base, 1 - ptx::cluster_rank()) - smem.base;
}
template <class Smem>
__device__ __forceinline__ void init_tile_idx_barriers(const Smem& smem) {
  for (int i = 0; i < Smem::kTileIdxSlots; ++i) ptx::init_barrier(smem.tile_idx_full(i), 1);
}
template <class Smem>
__device__ __forceinline__ void send_tile_idx(const Smem& smem, unsigned n, int x) {
  const unsigned there = to_other_block(smem);
  ptx::store_async(smem.tile_idx(n) + there, static_cast<unsigned>(x), smem.tile_idx_full(n) + there);
}
// Called by all lanes of a warp.
template <class Smem>
__device__ __forceinline__ int receive_tile_idx(const Smem& smem, unsigned n) {
  if (threadIdx.x % 32 == 0) ptx::arrive_expecting(smem.tile_idx_full(n), 4);
  __syncwarp();
  ptx::wait_phase(smem.tile_idx_full(n), n / Smem::kTileIdxSlots % 2);
  return static_cast<int>(ptx::load_shared_u32(smem.tile_idx(n)));
}

}  // namespace attune::scheduler
