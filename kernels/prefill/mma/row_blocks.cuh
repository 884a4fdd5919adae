// SPDX-License-Identifier: Apache-2.0
// The row blocks that a block of the grid takes.
#pragma once

#include "prefill/mma/config.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill_mma {

// One of a query head (x) and a sequence (y), those of the last rows first (z); further ones only where the grid is
// smaller than the problem. start(work): what thread 0 does beside storing the work tile.
template <class Storage, class Start, class Attend>
__device__ __forceinline__ void for_row_blocks(const WorkTileParams& p, Storage& shared, const Start& start,
                                               const Attend& attend) {
  const int blocks = static_cast<int>(gridDim.z);
  for (int b = static_cast<int>(blockIdx.y); b < p.batch; b += static_cast<int>(gridDim.y)) {
    for (int block = blocks - 1 - static_cast<int>(blockIdx.z);; block += blocks) {
      const scheduler::SequenceInfo s = scheduler::read_sequence(p, b);  // again: kept, it would take registers
      if (block >= s.row_blocks) break;
      const WorkTile work = scheduler::block_work<Config::kKeys>(p, s, b, block);
      if (threadIdx.x == 0) {
        shared.work = work;
        shared.head = static_cast<int>(blockIdx.x), shared.kv_head = kernels::divide(shared.head, p.by_group);
        start(work);
      }
      __syncthreads();
      attend();
      __syncthreads();  // the next row block may overwrite shared memory
    }
  }
}

}  // namespace attune::prefill_mma
