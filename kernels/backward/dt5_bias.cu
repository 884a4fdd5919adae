// SPDX-License-Identifier: Apache-2.0
// Sums for dt5_bias, the gradient of T5's bias, by mma.sync. It runs beside whichever kernel computes dq, dk and dv.
//
//   dt5_bias[h, bucket] = sum of dZ over the pairs of head h whose key is at a distance of that bucket
//
// Grid: a block has 128 queries of a sequence and a head, 64 or 32 at a time, and streams the keys that they see. A
// warp has 16 rows and 32 columns of dZ; pairs at the same distance are a diagonal of these. The warp sums the
// diagonals, then the diagonals of each bucket, which are neighbours, and adds each bucket's sum to the warp's sums in
// shared memory. The warps' sums are added in order, and sum_blocks.cu adds those of the blocks. All orders are fixed,
// so the bits are the same in every run.
//
//   Q, dO | K, V | S | dP | dZ | all have read | dZ -> shared memory, over K and V | diagonals -> buckets | next K, V
#include "backward/block_sums.cuh"
#include "backward/mma/dz.cuh"
#include "ptx/grid.cuh"

namespace attune::backward::mma {

static_assert(Config::kGradients == kernels::kGradientDt5Bias);

// A warp's dZ, which overlays K and V: [8][columns]. Row g + 8 is added to row g, 8 columns to the left.
constexpr int kColumns = 8 * (kN8Tiles + 1), kPitch = kColumns + 1;
// Distances from -15 to kStep - 1, relative to that of the tile's first key and the warp's first query.
constexpr int kDiagonals = kColumns + 7;
static_assert(Config::kWarps * 8 * kPitch * 4 <= Config::kTile * (LayoutQk::kPitch + LayoutVdo::kPitch),
              "dZ does not fit over a tile of K and V");

__device__ __forceinline__ void clear_buckets(const Smem& smem) {
  const unsigned to = smem.buckets(threadIdx.x / 32);
  for (int i = static_cast<int>(threadIdx.x) % 32; i < kernels::kMostT5Entries; i += 32)
    ptx::store_shared_u32(to + 4 * i, 0);
}

__device__ __forceinline__ void store_diagonals(unsigned to, const Scores& dz) {
  const unsigned at = to + (static_cast<int>(threadIdx.x) % 32 / 4 * kPitch + first_column()) * 4;
#pragma unroll
  for (int n = 0; n <= kN8Tiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float below = n < kN8Tiles ? dz[n][2 + e] : 0.0f, above = n > 0 ? dz[n - 1][e] : 0.0f;
      ptx::store_shared_u32(at + (8 * n + e) * 4, __float_as_uint(above + below));
    }
  }
}

// The sum of the diagonal that has column `diagonal` in row 7.
__device__ __forceinline__ float diagonal_sum(unsigned from, int diagonal) {
  float sum = 0;
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    const int column = diagonal - 7 + row;
    if (0 <= column && column < kColumns) sum += ptx::load_shared(from + (row * kPitch + column) * 4);
  }
  return sum;
}

// Adds this warp's dZ to its buckets. relative: from its first query to the tile's first key.
__device__ __forceinline__ void add_to_buckets(const BackwardParams& p, const Smem& smem, int relative,
                                               const Scores& dz) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned warp_dz = smem.qk() + warp * 8 * kPitch * 4, buckets = smem.buckets(warp);
  store_diagonals(warp_dz, dz);
  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < kDiagonals; first += 32) {
    const int diagonal = first + lane;
    float sum = diagonal < kDiagonals ? diagonal_sum(warp_dz, diagonal) : 0.0f;
    const int bucket = diagonal < kDiagonals ? common::t5_bucket(p.t5, relative + diagonal - 15) : -1;
    // The lanes of a bucket are neighbours. Each adds the sums of the lanes after it, so the first lane gets the total.
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float more = __shfl_sync(0xffffffffu, sum, lane + step);
      const int of = __shfl_sync(0xffffffffu, bucket, lane + step);
      if (lane + step < 32 && of == bucket) sum += more;
    }
    const int before = __shfl_up_sync(0xffffffffu, bucket, 1);
    if (bucket >= 0 && (lane == 0 || before != bucket)) {
      const unsigned at = buckets + 4 * bucket;
      ptx::store_shared_u32(at, __float_as_uint(ptx::load_shared(at) + sum));
    }
    __syncwarp();
  }
}

// Adds dZ of the resident rows and all keys that they see.
__device__ __forceinline__ void add_rows(const BackwardParams& p, const Smem& smem) {
  const WorkTile& work = smem.work();
  if (work.first >= work.last) return;
  copy_resident(p, smem);
#pragma unroll 1
  for (int key = work.first; key < work.last; key += Config::kTile) {
    Scores dz;
    const bool any = make_dz(p, smem, work.head, key, dz);
    __syncthreads();  // all warps have read the tile
    const int row = work.begin + static_cast<int>(threadIdx.x) / 32 * 16;
    if (any) add_to_buckets(p, smem, key - (work.s.num_keys - work.s.num_q + row), dz);
  }
}

__device__ __forceinline__ void run(const BackwardParams& p, const Smem& smem, const BackwardTile& tile, int head) {
  clear_buckets(smem);
#pragma unroll 1
  for (int slice = 0; slice < Config::kBlocksOfTile; ++slice) {
    __syncthreads();  // all warps have finished the previous work
    if (threadIdx.x == 0) smem.work() = work_tile_of(p, tile, slice, head);
    __syncthreads();
    add_rows(p, smem);
  }
  __syncthreads();
  const SequenceInfo s = smem.work().s;
  for (int i = static_cast<int>(threadIdx.x); i < p.t5_entries; i += Config::kThreads) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < Config::kWarps; ++warp) sum += ptx::load_shared(smem.buckets(warp) + 4 * i);
    const long long line = static_cast<long long>(head) * p.t5_entries + i;
    p.t5_sums[block_sum_at(p, s, tile.batch, line, tile.begin)] = sum;
  }
}

}  // namespace attune::backward::mma

extern "C" __global__ void __launch_bounds__(attune::backward::mma::Config::kThreads, ATTUNE_BLOCKS_PER_SM)
    attune_backward_dt5_bias(const __grid_constant__ attune::kernels::BackwardParams p) {
  using namespace attune;
  using namespace attune::backward;
  ptx::wait_for_previous_kernels();
  const GridBlock block(p.num_heads_q);
  if (block.index >= p.q_list->num_tiles) return;
  mma::run(p, mma::Smem(ptx::dynamic_shared()), tiles_of(p.q_list)[block.index], block.head);
}
