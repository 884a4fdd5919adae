// SPDX-License-Identifier: Apache-2.0
// The epilogue of the M = 64 kernel. Each warpgroup stores its half of the channels: normalised to `out`, or
// unnormalised to the workspace as the partial output of a split, which mla/combine.cu merges.
#pragma once

#include "common/lanes.cuh"
#include "mla/m64/mainloop.cuh"
#include "mla/partial_out.cuh"

namespace attune::mla {

// Called by all lanes of the warp, also for rows that do not exist. Of the four lanes that share two rows, the first
// two finish one each. rescale: the factor that makes O relative to row_max.
__device__ __forceinline__ void store_out(const WorkTileParams& p, const WorkTile& t, const Rows& rows,
                                          const Accumulators& a, const float (&rescale)[2]) {
  const int lane = threadIdx.x % 32, mine = lane % 2;
  const int token = rows.token(mine), head = rows.head(mine);
  const auto own = [mine](const float(&x)[2]) { return mine != 0 ? x[1] : x[0]; };
  // With dequant producers they are selected after the branch, below: which order spills less depends on the producer.
  const float max = Config::kDequant ? 0 : own(a.row_max), row_sum = Config::kDequant ? 0 : own(a.row_sum);
  float own_factor = 0;
  long long own_at = -1;
  if (token >= 0) {
    own_at = out_at(p, t, token, head);
    if (lane % 4 < 2)
      own_factor = common::finish_row(p, t.batch, t.q_begin, token, head, Config::kDequant ? own(a.row_max) : max,
                                      Config::kDequant ? own(a.row_sum) : row_sum, consumer_warpgroup() == 0);
  }
  __syncwarp();
  // The common path is short, because its instructions miss the instruction cache in each work tile.
  const int channel = consumer_warpgroup() * Config::kChannels;
  if (common::is_16_bit(Config::kOutType) && p.store_vectors) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = __shfl_sync(0xffffffffu, own_factor, (lane & ~3) + h) * rescale[h];
      const long long at = __shfl_sync(0xffffffffu, own_at, (lane & ~3) + h);
      char* const to = p.out + (at + channel + 8 * (lane % 4)) * 2;
#pragma unroll
      for (int i = 0; i < Config::kChannels / 32; ++i) {
        unsigned r[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = a.o[16 * i + 4 * j + 2 * h] * factor, y = a.o[16 * i + 4 * j + 2 * h + 1] * factor;
          r[j] = common::pack<Config::kOutType>(x, y);
        }
        common::transpose_quad(r);
        if (at >= 0) *reinterpret_cast<uint4*>(to + 64 * i) = make_uint4(r[0], r[1], r[2], r[3]);
      }
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = __shfl_sync(0xffffffffu, own_factor, (lane & ~3) + h) * rescale[h];
    const long long at = __shfl_sync(0xffffffffu, own_at, (lane & ~3) + h);
#pragma unroll
    for (int i = 0; i < Config::kChannels / 4; ++i) {
      if (at >= 0)
        common::store_element(Config::kOutType, p.out,
                              at + (channel + i / 2 * 8 + lane % 4 * 2 + i % 2) * p.out_dim_stride,
                              a.o[i / 2 * 4 + 2 * h + i % 2] * factor);
    }
  }
}

// Upper bounds of the thread's elements of O: for two rows, two words, each with two groups of 64 channels.
struct Bounds {
  unsigned of_row[2][2];
  __device__ __forceinline__ bool finite() const {
    return are_finite(
        ptx::max_u16x2(ptx::max_u16x2(of_row[0][0], of_row[0][1]), ptx::max_u16x2(of_row[1][0], of_row[1][1])));
  }
};
template <bool kFinite>
__device__ __forceinline__ void find_bounds(const Accumulators& a, Bounds& bounds) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto bound = [&](int k) {
      const auto number = [&](int i) { return a.o[kChannelsOfScale / 2 * k + i / 2 * 4 + 2 * h + i % 2]; };
      return kFinite ? finite_bound_of(number) : bound_of(number);
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) bounds.of_row[h][i] = two_bounds(bound(2 * i), bound(2 * i + 1));
  }
}

// The row stats of the partial output, for the thread's first row.
__device__ __forceinline__ float* own_stats(const WorkTileParams& p, const WorkTile& t, int head_tile) {
  const unsigned thread = ptx::opaque(threadIdx.x) % 128;
  return partial_stats_at(p.partial_stats, partial_idx(p, t, head_tile), thread / 32 * 16 + thread % 32 / 4,
                          consumer_warpgroup());
}

// Stores O relative to row_max_ref. nonfinite: set for fp16 partial outputs only; the rows that may have a NaN or
// infinity.
__device__ __forceinline__ void store_partial(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                              const Accumulators& a, bool (&nonfinite)[2]) {
  const unsigned thread = ptx::opaque(threadIdx.x) % 128, lane = thread % 32;
  char* const to = partial_out_at(p.partial_out, partial_idx(p, t, head_tile), thread / 32 * 16 + lane / 4,
                                  consumer_warpgroup() * Config::kChannels + lane % 4 * 2);
  if constexpr (kFp16Partials) {
    Bounds bounds;
    find_bounds<false>(a, bounds);
    // Dense rows that are not finite are recomputed (mla/m64/recompute.cuh).
    if (Config::kSparse && __any_sync(0xffffffffu, !bounds.finite())) [[unlikely]]
      find_bounds<true>(a, bounds);
    unsigned exponents[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      exponents[h] = ptx::permute_bytes(bounds_of_four(bounds.of_row[h][0]) << 1,
                                        bounds_of_four(bounds.of_row[h][1]) << 1, 0x7531);
    }
#pragma unroll
    for (int j = 0; j < Config::kChannels / 16; ++j) {
      unsigned r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = factor_of(exponents[i % 2] >> j * 16 / kChannelsOfScale * 8 & 0xff);
        r[i] = ptx::pack_f16(a.o[8 * j + 2 * i] * factor, a.o[8 * j + 2 * i + 1] * factor);
      }
      *reinterpret_cast<uint4*>(to + 512 * j) = make_uint4(r[0], r[1], r[2], r[3]);
    }
    float* const stats = own_stats(p, t, head_tile);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      nonfinite[h] = is_any_infinite(exponents[h]);
      if (lane % 4 == 0) stats[8 * kPartialStats * h + 3] = __uint_as_float(exponents[h] - kToInverse * 0x01010101);
    }
  } else {
#pragma unroll
    for (int j = 0; j < Config::kChannels / 8; ++j) {
      *reinterpret_cast<float4*>(to + 512 * j) =
          make_float4(a.o[4 * j], a.o[4 * j + 1], a.o[4 * j + 2], a.o[4 * j + 3]);
    }
  }
}
// Stores the row stats of the partial output.
__device__ __forceinline__ void store_partial_stats(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                                    const Accumulators& a, const float (&rescale)[2]) {
  if (ptx::opaque(threadIdx.x) % 4 != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* const stats = own_stats(p, t, head_tile) + 8 * kPartialStats * h;
    *reinterpret_cast<float2*>(stats) = make_float2(a.row_max[h], a.row_sum[h]);
    stats[2] = rescale[h];
  }
}

}  // namespace attune::mla
