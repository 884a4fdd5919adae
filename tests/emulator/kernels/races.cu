// SPDX-License-Identifier: Apache-2.0
// Small kernels that are right where `broken` is 0, and else have one defect each (tests/emulated_races_test.cpp).
#include "ptx/async_copy.cuh"
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"

using namespace attune;

constexpr int kStages = 2, kTileBytes = 512;

// Warp 0 has tiles copied to a ring of stages, warps 1 and 2 add up their bytes: sums[thread - 32].
struct Ring {
  alignas(128) unsigned char tiles[kStages][kTileBytes];
  unsigned flag;
  alignas(8) unsigned long long full[kStages], empty[kStages];
};
extern "C" __global__ void pipeline(const unsigned char* from, int tiles, unsigned* sums, int broken) {
  Ring& ring = *reinterpret_cast<Ring*>(ptx::dynamic_shared());
  const unsigned full = ptx::shared_address(ring.full), empty = ptx::shared_address(ring.empty);
  // 1: the flag lies in the last tile, as a sum of sizes by hand would have it.
  unsigned& flag = broken == 1 ? *reinterpret_cast<unsigned*>(ring.tiles[1] + kTileBytes - 4) : ring.flag;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) ptx::init_barrier(full + 8 * i, 1), ptx::init_barrier(empty + 8 * i, 2);
    ptx::publish_barriers();
    flag = 1;
  }
  if (broken != 2) __syncthreads();  // 2: barriers that nobody knows to be there
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned sum = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    const unsigned parity = tile / kStages % 2;
    if (warp == 0) {
      if (broken != 3) ptx::wait_phase(empty + 8 * stage, parity ^ 1);  // 3: nobody waits for the consumers
      if (ptx::elect()) {
        ptx::arrive_expecting(full + 8 * stage, kTileBytes);
        ptx::copy_bytes(ptx::shared_address(ring.tiles[stage]), from + tile * kTileBytes, kTileBytes, full + 8 * stage);
      }
      __syncwarp();
      continue;
    }
    // 4: the other parity; 5: nobody waits.
    if (broken != 5) ptx::wait_phase(full + 8 * stage, broken == 4 ? parity ^ 1 : parity);
    if (broken == 6 && lane == 0) ptx::arrive(empty + 8 * stage);  // 6: free before it has been read
    for (int i = lane; i < kTileBytes; i += 32) sum += ring.tiles[stage][i];
    if (broken != 7) __syncwarp();  // 7: free before all lanes have read it
    // 8: three lanes of each warp, so that three phases end, of which the last looks like the first; 9: one lane more.
    const bool arrives = lane == 0 || (broken == 8 && lane < 3) || (broken == 9 && warp == 1 && lane == 1);
    if (broken != 6 && arrives) ptx::arrive(empty + 8 * stage);
  }
  if (warp > 0) sums[threadIdx.x - 32] = sum + flag;
}

// Each thread passes a number to another one, twice.
extern "C" __global__ void pass_on(unsigned* out, int broken) {
  __shared__ unsigned numbers[128], more[33];
  const unsigned thread = threadIdx.x, lane = thread % 32;
  numbers[thread] = thread;
  if (broken != 1) __syncthreads();  // 1: no barrier
  unsigned x = numbers[(thread + 32) % 128];
  if (broken != 2) __syncthreads();  // 2: others may still read
  numbers[thread] = x;
  if (broken != 3) __syncwarp();  // 3: lanes of a warp
  x += numbers[thread ^ 1];
  if (thread < 32) {
    more[lane] = x;
    __syncwarp();
    x += more[broken == 4 ? lane + 1 : lane ^ 2];  // 4: one that nobody has written
  }
  // Numbered barriers: warps 0 and 1 produce, 2 and 3 consume.
  __syncthreads();
  if (thread < 64) {
    if (broken == 5) ptx::named_barrier_arrive(1, 128);  // 5: told before it is there
    numbers[thread] = x;
    if (broken != 5) ptx::named_barrier_arrive(1, 128);
  } else {
    ptx::named_barrier_sync(1, 128);
    x += numbers[thread - 64];
  }
  out[thread] = x;
}

// cp.async.
extern "C" __global__ void copy_words(const unsigned* from, unsigned* to, int broken) {
  auto& words = *reinterpret_cast<unsigned(*)[3][128]>(ptx::dynamic_shared());
  const unsigned barrier = ptx::shared_address(&words + 1);
  if (threadIdx.x == 0) ptx::init_barrier(barrier, 128);
  __syncthreads();
  for (int i = 0; i < 2; ++i) {
    ptx::copy_async<4>(ptx::shared_address(&words[i][threadIdx.x]), from + 128 * i + threadIdx.x, 4);
    ptx::commit_copies();
  }
  ptx::wait_copies<1>();
  unsigned x = words[0][threadIdx.x];
  if (broken != 1) ptx::wait_copies<0>();  // 1: the second is on its way
  x += words[1][threadIdx.x];
  if (broken != 2) __syncthreads();  // 2: other threads' copies
  x += words[1][127 - threadIdx.x];
  ptx::copy_async<4>(ptx::shared_address(&words[2][threadIdx.x]), from + threadIdx.x, 4);
  words[0][threadIdx.x] = x;
  ptx::arrive_after_copies(barrier);
  if (broken != 3) ptx::wait_phase(barrier, 0);       // 3: before all have come
  x += words[broken == 4 ? 0 : 2][127 - threadIdx.x];  // 4: no copy, and not told of
  to[threadIdx.x] = x;
}

// d [64, 32] = a [64, 16] b [32, 16]^T of ones, written by threads.
extern "C" __global__ void multiply_ones(float* out, int broken) {
  unsigned char* const shared = ptx::dynamic_shared();
  const unsigned a = ptx::shared_address(shared), b = a + 64 * 128;
  for (unsigned i = threadIdx.x; i < 96 * 32; i += 128) ptx::store_shared_u32(a + 4 * i, 0x3f803f80u);
  if (broken != 1) ptx::fence_async_proxy();  // 1: no fence before what products read
  __syncthreads();
  float d[16] = {};
  ptx::wgmma_fence();
  ptx::Wgmma<32, ptx::Type::kBf16>::ss(d, ptx::descriptor_k_major(a), ptx::descriptor_k_major(b), 0);
  ptx::wgmma_commit();
  if (broken == 4) out[threadIdx.x] = d[1];  // 4: not there yet
  if (broken != 2) ptx::wgmma_wait<0>();  // 2: the operands change while it runs
  if (broken != 3) __syncthreads();          // 3: other warps' products
  ptx::store_shared_u32(b + 4 * threadIdx.x, 0);
  if (broken == 2) ptx::wgmma_wait<0>();
  ptx::fence_operand(d);
  out[threadIdx.x] = d[0];
}

// Each block adds its part, the last one to come adds up all.
extern "C" __global__ void add_parts(unsigned* parts, unsigned* counter, unsigned* sum, int broken) {
  __shared__ bool is_last;
  parts[blockIdx.x * 32 + threadIdx.x] = threadIdx.x;
  if (broken == 1 && threadIdx.x == 0) sum[1] = blockIdx.x;  // 1: all blocks write it
  if (broken != 2) __syncwarp();         // 2: told before all lanes have written
  if (threadIdx.x == 0) {
    is_last = broken == 3 ? atomicAdd(counter, 1u) == gridDim.x - 1  // 3: orders nothing
                          : ptx::count_arrival(counter, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncwarp();
  if (!is_last) return;
  unsigned all = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) all += parts[i * 32 + threadIdx.x];
  for (unsigned step = 16; step > 0; step /= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
  if (threadIdx.x == 0) *sum = all;
}

// Two blocks of a cluster read each other's shared memory, and send numbers there.
extern "C" __global__ void meet_in_cluster(unsigned* out, int broken) {
  struct Shared {
    unsigned mine[32], received[32];
    alignas(8) unsigned long long barrier;
  };
  Shared& shared = *reinterpret_cast<Shared*>(ptx::dynamic_shared());
  const int other = 1 - ptx::cluster_rank();
  const unsigned barrier = ptx::shared_address(&shared.barrier), lane = threadIdx.x;
  shared.mine[lane] = blockIdx.x * 32 + lane;
  if (lane == 0) {
    ptx::init_barrier(barrier, 1);
    ptx::arrive_expecting(barrier, 32 * 4);
    ptx::publish_barriers();
  }
  ptx::arrive_at_cluster();
  if (broken != 1) ptx::wait_for_cluster();  // 1: the other block may not be there yet
  unsigned x = *ptx::in_block(&shared.mine[lane], other);
  ptx::store_async(ptx::shared_in_block(ptx::shared_address(&shared.received[lane]), other), x,
                   ptx::shared_in_block(barrier, other));
  if (broken != 2) ptx::wait_phase(barrier, 0);  // 2: read before it has come
  x += shared.received[lane];
  if (broken != 1 && broken != 3) ptx::cluster_barrier();  // 3: the other block may still read
  shared.mine[lane] = 0;
  if (broken == 1) ptx::wait_for_cluster();
  if (broken == 4) x += *ptx::in_block(&shared.received[lane], other);  // 4: the other block may have ended
  if (broken != 4) ptx::cluster_barrier();
  out[blockIdx.x * 32 + lane] = x;
}
