// SPDX-License-Identifier: Apache-2.0
// The epilogue of the gradient kernel: a warp stages its 16 resident rows in shared memory, over the inputs, and stores
// whole rows. Stored from the accumulators, two channels of a row at most go together, and the branches by dtype and
// strides are repeated for each pair of registers.
#pragma once

#include "backward/mainloop_ops.cuh"

namespace attune::backward {

// Whether an accumulator of this thread is a NaN or infinity.
template <int kCount>
__device__ __forceinline__ bool any_nonfinite(const float (&x)[kCount]) {
  float sums[4] = {};  // of zeros, or NaN; four, because an addition waits for the one before
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] = fmaf(x[i], 0.0f, sums[i % 4]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]) != 0.0f;
}

// Flags a work tile with a NaN or infinity for recompute.cu. The pass of dv keeps the flag that the pass of dk has set.
__device__ __forceinline__ void flag_nonfinite(const BackwardParams& p, int work_tile_idx, bool any) {
  int& flag = (Config::kOfQueries ? p.q_nonfinite : p.kv_nonfinite)[work_tile_idx];
  const bool before = Config::kGradients == kernels::kGradientDv && p.dk.data != nullptr && flag != 0;
  flag = any || before ? 1 : 0;
}

// Of a warp: one area for both gradients, because others may still store the first.
constexpr int kStagedBytes =
    16 * 4 * (Config::kChannelsQk > Config::kChannelsV ? Config::kChannelsQk : Config::kChannelsV);
static_assert(Config::kConsumerWarps * kStagedBytes <= ATTUNE_OFFSET_OF(SharedStorage, sums),
              "dq may still be read there");

// Stages a thread's elements of its two resident rows as fp32, [16 rows of its warp][channels]. Tiles of eight channels
// are swizzled within a row against bank conflicts.
template <int kHalf>
__device__ __forceinline__ void stage_rows(unsigned to, const float (&x)[kHalf], float factor) {
  constexpr int kRowBytes = 2 * kHalf * 4;
  const int row = static_cast<int>(threadIdx.x) % 32 / 4;
  to += row * kRowBytes + row % 4 * 32 + static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
  for (int j = 0; j < kHalf; j += 2) {
    const int n8 = j / 4, next_row = j / 2 % 2 * 8;
    ptx::store_shared_two((to ^ n8 % 4 * 32) + n8 / 4 * 128 + next_row * kRowBytes, __float_as_uint(factor * x[j]),
                          __float_as_uint(factor * x[j + 1]));
  }
}

// Stores a gradient of the block's resident rows. Called by all consumers after a barrier: no tile is read any more.
template <int kHeadDim, int kHalf>
__device__ __forceinline__ void store(const BackwardParams& p, const Smem& smem, const WorkTile& w,
                                      const GradientRows& to, const float (&x)[kHalf], float factor) {
  constexpr int kN8Tiles = (kHeadDim + 7) / 8, kRowBytes = 2 * kHalf * 4;
  if (to.data == nullptr) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = (static_cast<int>(threadIdx.x) - 128) / 32;
  const unsigned rows = smem.resident_qk() + warp * kStagedBytes;
  __syncwarp();  // it may still read the rows of another gradient
  stage_rows(rows, x, factor);
  __syncwarp();
  const bool eights = takes_eights<kHeadDim>(to);
#pragma unroll 1
  for (int i = lane; i < 16 * kN8Tiles; i += 32) {
    const int row = i / kN8Tiles, n8 = i % kN8Tiles, resident = w.begin + 16 * warp + row;
    if (resident >= w.end) break;
    const unsigned from = rows + row * kRowBytes + (n8 ^ row % 4) * 32;
    unsigned bits[2][4];
    float eight[8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ptx::load_shared_four(from + 16 * h, bits[h]);
#pragma unroll
      for (int e = 0; e < 4; ++e) eight[4 * h + e] = __uint_as_float(bits[h][e]);
    }
    const long long first = Config::kOfQueries ? query_offset(p, w.s, w.batch, to, resident, w.head)
                                               : key_offset(w.s, w.batch, to, resident, w.head);
    store_eight<kHeadDim>(to, eights, first, 8 * n8, eight);
  }
}

}  // namespace attune::backward
