// SPDX-License-Identifier: Apache-2.0
// Adds dq of each tile from shared memory to the sums in global memory, when all blocks of keys before this one have:
// one warp for the half of the channels that a warpgroup has. The blocks before have been taken before (gradients.cu),
// so they run or have ended. Turns are counted: where cu_seqlens_q is wrong and sequences overlap, a tile has more
// than its blocks count, and nobody waits for ever.
#pragma once

#include "backward/config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::backward {

class DqWriter {
 public:
  __device__ __forceinline__ DqWriter(const BackwardParams& p, const Smem& smem, const Work& work, int group)
      : p_(p), smem_(smem), work_(work), group_(group) {}

  __device__ __forceinline__ void run() const {
    const int steps = work_.heads * work_.tiles;
    int row = work_.first, head = work_.head * p_.group, left = work_.tiles;
    for (int i = 0; i < steps; ++i) {
      const long long half = 2 * dq_tile_at(p_, work_.s, work_.batch, head, row) + group_;
      unsigned* const turns = p_.dq_turns + half;
      const unsigned turn = static_cast<unsigned>(dq_turn(p_, work_.s, row, work_.begin));
      ptx::named_barrier_sync(kDqFullBarrier + group_, kDqThreads);
      if (threadIdx.x % 32 == 0) {
        ptx::wait_for_arrivals(turns, turn);
        ptx::fence_async_proxy_global();
        add(p_.dq_sums + half * (Tile::kFloats / 2), turn == 0);
        ptx::wait_until_read();
      }
      __syncwarp();
      if (i + 1 < steps) ptx::named_barrier_arrive(kDqEmptyBarrier + group_, kDqThreads);
      if (threadIdx.x % 32 == 0) {
        ptx::wait_until_stored();
        ptx::fence_async_proxy_global();
        ptx::add_arrivals(turns, 1);
      }
      __syncwarp();
      row += Config::kTile;
      if (--left == 0) row = work_.first, left = work_.tiles, ++head;
    }
  }

 private:
  using Tile = DqTile<Config::kHeadDimQk>;

  __device__ __forceinline__ void add(float* to, bool first) const {
    if (first) {
      ptx::store_bytes(to, smem_.dq(group_), Tile::kHalfBytes);
    } else {
      ptx::add_floats(to, smem_.dq(group_), Tile::kHalfBytes);
    }
    ptx::commit_stores();
  }

  const BackwardParams& p_;
  const Smem& smem_;
  const Work& work_;
  const int group_;
};

}  // namespace attune::backward
