// SPDX-License-Identifier: Apache-2.0
// The dq writers add dq of each step from shared memory to the sums in global memory, in the order of dq.cuh: a
// semaphore of each tile counts the blocks that have added. Three warps alternate, because wait, add and
// release take longer than the GEMMs of a tile. A wait cannot deadlock: the blocks that add earlier took their work
// tile earlier (gradients.cu), so they are running or have ended.
//
// If sequences overlap, because cu_seqlens_q is wrong, they share semaphores. Then a count may exceed what a block
// waits for, but waits still end.
#pragma once

#include "backward/config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"

namespace attune::backward {

class DqWriter {
 public:
  // number: this warp's number among the dq writers.
  __device__ __forceinline__ DqWriter(const BackwardParams& p, const Smem& smem, const WorkTile& work, int number)
      : p_(p), smem_(smem), work_(work), number_(number) {}

  __device__ __forceinline__ void run() const {
    for (int i = number_; i < work_.steps(); i += Config::kWriters) {
      const int buffer = i % Config::kDqBuffers;
      const int row = row_of_tile(work_, i / work_.heads);
      const long long tile = Tile::at(p_, work_.s, work_.batch, work_.head * p_.group + i % work_.heads, row);
      const unsigned adds_before =
          static_cast<unsigned>(dq_adds_before(p_, work_.s, work_.batch, row, work_.begin));
      if (threadIdx.x % 32 == 0) ptx::wait_for_arrivals(p_.dq_semaphores + tile, adds_before);
      __syncwarp();
      ptx::named_barrier_sync(kDqFullBarrier + number_, kDqFullThreads);
      if (threadIdx.x % 32 == 0) {
        ptx::fence_async_proxy_global();
        add(p_.dq_sums + tile * Tile::kFloats, smem_.dq(buffer), adds_before == 0);
        ptx::wait_until_read();
      }
      __syncwarp();
      if (i + Config::kDqBuffers < work_.steps()) {
#pragma unroll
        for (int group = 0; group < Config::kConsumerGroups; ++group)
          ptx::named_barrier_arrive(dq_empty_barrier(buffer, group), kDqEmptyThreads);
      }
      if (threadIdx.x % 32 == 0) {
        ptx::wait_until_stored();
        ptx::fence_async_proxy_global();
        ptx::release_arrival(p_.dq_semaphores + tile);
      }
      __syncwarp();
    }
  }

 private:
  using Tile = Config::DqTile;

  __device__ __forceinline__ static void add(float* to, unsigned from, bool first) {
    if (first) {
      ptx::store_bytes(to, from, Tile::kFloats * 4);
    } else {
      ptx::add_floats(to, from, Tile::kFloats * 4);
    }
    ptx::commit_stores();
  }

  const BackwardParams& p_;
  const Smem& smem_;
  const WorkTile& work_;
  const int number_;
};

}  // namespace attune::backward
