// SPDX-License-Identifier: Apache-2.0
// The row blocks that a thread block takes.
#pragma once

#include "prefill/mma/config.cuh"
#include "scheduler/work_tiles.cuh"

namespace attune::prefill_mma {

// Runs attend() for each row block of a query head (blockIdx.x) and a sequence (blockIdx.y); the last rows come first
// (blockIdx.z). A thread block takes more than one only if the grid is smaller than the problem. start(work): called by
// thread 0 when it stores the work tile.
template <class Storage, class Start, class Attend>
__device__ __forceinline__ void for_row_blocks(const WorkTileParams& p, Storage& shared, const Start& start,
                                               const Attend& attend) {
  const int blocks = static_cast<int>(gridDim.z);
  for (int b = static_cast<int>(blockIdx.y); b < p.batch; b += static_cast<int>(gridDim.y)) {
    for (int block = blocks - 1 - static_cast<int>(blockIdx.z);; block += blocks) {
      const scheduler::SequenceInfo s = scheduler::read_sequence(p, b);  // read twice: it would take registers
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
