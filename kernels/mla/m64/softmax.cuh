// SPDX-License-Identifier: Apache-2.0
// The online softmax of the two consumer warpgroups: row max, P and row sum of a tile; at the end, the stats of a row.
#pragma once

#include "common/lanes.cuh"
#include "mla/m64/mask.cuh"
#include "ptx/convert.cuh"

namespace attune::mla {

struct Accumulators {
  float o[Config::kChannels / 2];
  // row_max and row_max_ref are in units of S before scaling. row_max and row_sum are of this warpgroup's tiles;
  // row_sum is of this thread's keys only. O and row_sum are relative to row_max_ref.
  float row_max[2], row_max_ref[2], row_sum[2];
};

__device__ __forceinline__ void rescale_o(const float (&rescale)[2], Accumulators& a) {
  if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) [[unlikely]] {
#pragma unroll
    for (int i = 0; i < Config::kChannels / 2; ++i) a.o[i] *= rescale[i / 2 % 2];
  }
}

template <int kWarpgroup>
struct Softmax {
  static constexpr int kPRegs = Config::kBlockN / 4;  // registers of P of a tile, in a thread
  // Deferred rescale: P may reach 2^8 before O is rescaled, which is rare after the first tile.
  static constexpr float kRescaleThreshold = 8;

  // Replaces S by P in place, and sets the factor by which O and row_sum must be rescaled.
  __device__ __forceinline__ static void softmax(const Smem& smem, float c, const TileMask& mask,
                                                 const Rows& rows, float (&s)[Config::kBlockN / 2], float (&rescale)[2],
                                                 Accumulators& a) {
    apply_mask(smem, mask, rows, s);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float max[4];
#pragma unroll
      for (int j = 0; j < Config::kBlockN / 8; ++j) {
        const float pair = fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
        max[j % 4] = fmaxf(j < 4 ? a.row_max[h] : max[j % 4], pair);
      }
      const float row_max = common::quad_max(fmaxf(fmaxf(max[0], max[1]), fmaxf(max[2], max[3])));
      a.row_max[h] = row_max;
      rescale[h] = 1.0f;
      if ((row_max - a.row_max_ref[h]) * c > kRescaleThreshold) {
        rescale[h] = ptx::exp2_approx((a.row_max_ref[h] - row_max) * c);
        a.row_max_ref[h] = row_max;
      }
      const float row_max_ref = finite_row_max(a.row_max_ref[h]) * c;
#pragma unroll
      for (int i = 0; i < Config::kBlockN / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * h + i % 2];
        x = ptx::exp2_approx(fmaf(x, c, -row_max_ref));
      }
    }
  }

  // Converts P to the A operand of the PV GEMM.
  __device__ __forceinline__ static void convert_p(const float (&s)[Config::kBlockN / 2], unsigned (&p_regs)[kPRegs]) {
#pragma unroll
    for (int i = 0; i < kPRegs; ++i) {
      p_regs[i] = common::pack<Config::kType>(s[2 * i], s[2 * i + 1]);
    }
  }
  // Adds P to the row sum.
  __device__ __forceinline__ static void accumulate_row_sum(const float (&rescale)[2],
                                                            const float (&s)[Config::kBlockN / 2], Accumulators& a) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float row_sum[2] = {a.row_sum[h] * rescale[h], 0};
#pragma unroll
      for (int i = 0; i < Config::kBlockN / 4; ++i) row_sum[i % 2] += s[i / 2 * 4 + 2 * h + i % 2];
      a.row_sum[h] = row_sum[0] + row_sum[1];
    }
  }
};

// Merges the row stats of both warpgroups after the last tile: row_max becomes a score in base 2, row_sum relative to
// it. O stays relative to row_max_ref; rescale is its factor. scale: from S to scores in base 2.
__device__ __forceinline__ void finalize_softmax(const Smem& smem, float scale, Accumulators& a, float (&rescale)[2]) {
  const int warpgroup = consumer_warpgroup();
  // racecheck reports the stores with the loads of receive_p() and below: the warps of a pair synchronise in between.
  ptx::named_barrier_sync(warp_pair(), 64);  // all warps of the pair have read P
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    a.row_sum[h] = common::quad_sum(a.row_sum[h]);
    if (threadIdx.x % 4 == 0) smem.stats(warpgroup)[h] = make_float2(a.row_max[h], a.row_sum[h]);
  }
  ptx::named_barrier_sync(warp_pair(), 64);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 other = smem.stats(1 - warpgroup)[h];
    const float row_sum = a.row_sum[h] + other.y;
    a.row_max[h] = fmaxf(a.row_max[h], other.x);
    rescale[h] = a.row_max[h] == a.row_max_ref[h] ? 1.0f : ptx::exp2_approx((a.row_max_ref[h] - a.row_max[h]) * scale);
    a.row_sum[h] = row_sum * rescale[h];
    if (a.row_max[h] != -ptx::infinity()) a.row_max[h] *= scale;
  }
  ptx::named_barrier_sync(warp_pair(), 64);  // before the next work tile's stats are written
}

}  // namespace attune::mla
