// SPDX-License-Identifier: Apache-2.0
// Adds dq of each step from shared memory to the sums in global memory, when all blocks of keys before this one have.
// Three warps take steps in turn: to see that it is a tile's turn, to add, and to let the next block know takes longer
// than the products of a tile. The blocks before have been taken before (gradients.cu), so they run or have ended. Turns
// are counted: where cu_seqlens_q is wrong and sequences overlap, a tile has more than its blocks count, and nobody
// waits for ever.
#pragma once

#include "backward/config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::backward {

class DqWriter {
 public:
  // number: of this warp among the writers.
  __device__ __forceinline__ DqWriter(const BackwardParams& p, const Smem& smem, const Work& work, int number)
      : p_(p), smem_(smem), work_(work), number_(number) {}

  __device__ __forceinline__ void run() const {
    const int steps = work_.steps();
    for (int i = number_; i < steps; i += Config::kWriters) {
      const int row = work_.first + (work_.tiles - 1 - i / work_.heads) * Config::kTile;
      const long long tile = dq_tile_at(p_, work_.s, work_.batch, work_.head * p_.group + i % work_.heads, row);
      const unsigned turn = static_cast<unsigned>(dq_turn(p_, work_.s, row, work_.begin));
      if (threadIdx.x % 32 == 0) ptx::wait_for_arrivals(p_.dq_turns + tile, turn);
      __syncwarp();
      ptx::named_barrier_sync(kDqFullBarrier + number_, kDqThreads);
      if (threadIdx.x % 32 == 0) {
        ptx::fence_async_proxy_global();
        add(p_.dq_sums + tile * Tile::kFloats, smem_.dq(i % 2), turn == 0);
        ptx::wait_until_read();
      }
      __syncwarp();
      if (i + 2 < steps) ptx::named_barrier_arrive(kDqEmptyBarrier + i % 2, kDqThreads);
      if (threadIdx.x % 32 == 0) {
        ptx::wait_until_stored();
        ptx::fence_async_proxy_global();
        ptx::release_arrival(p_.dq_turns + tile);
      }
      __syncwarp();
    }
  }

 private:
  using Tile = DqTile<Config::kHeadDimQk>;

  __device__ __forceinline__ static void add(float* to, unsigned from, bool first) {
    if (first) {
      ptx::store_bytes(to, from, 2 * Tile::kHalfBytes);
    } else {
      ptx::add_floats(to, from, 2 * Tile::kHalfBytes);
    }
    ptx::commit_stores();
  }

  const BackwardParams& p_;
  const Smem& smem_;
  const Work& work_;
  const int number_;
};

}  // namespace attune::backward
