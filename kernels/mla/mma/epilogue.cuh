// SPDX-License-Identifier: Apache-2.0
// The epilogue of mla/mma.cu: row stats, then O of each warp's channels, normalised or as a partial output.
#pragma once

#include "common/finish.cuh"
#include "mla/mma/mainloop.cuh"
#include "mla/partial_out.cuh"

namespace attune::mla {

// One thread for each row stores the row stats of a split, or finishes the row. Afterwards shared.out_factor has the
// factors from O to the output.
__device__ __forceinline__ void mma_finish_rows(const WorkTileParams& p, MmaStorage& shared, const MmaMainloop& a) {
  if (a.has_row()) {
    float sum = a.row_sum;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (a.lane() % 4 == 0) {
      const WorkTile& t = shared.work;
      const int row = a.row();
      const float c = p.scale * kLog2e, ref = a.row_max_ref;
      float max = a.row_max;
      const float rescale = ptx::exp2_approx((max == ref ? 0.0f : (ref - max) * c) - MmaConfig::kOffset);
      sum *= rescale;
      if (max != -ptx::infinity()) max *= c;
      if (t.num_splits > 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* const stats = partial_stats_at(p.partial_stats, partial_idx(p, t, shared.head_tile), row, half);
          *reinterpret_cast<float2*>(stats) = make_float2(max, sum);
          stats[2] = rescale;
        }
      } else if (const MmaRow r(p, shared, row); r.exists) {
        shared.out_factor[row] = rescale * common::finish_row(p, t.batch, t.q_begin, r.token, r.head, max, sum);
      }
    }
  }
  MmaBarriers::sync_consumers();
}

__device__ __forceinline__ void mma_store_out(const WorkTileParams& p, const MmaStorage& shared, const MmaMainloop& a) {
  const WorkTile& t = shared.work;
  const int first = a.first_channel() + a.lane() % 4 * 2;
#pragma unroll
  for (int m = 0; m < MmaMainloop::kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = a.row_of_out(m, h);
      const MmaRow r(p, shared, row);
      if (!r.exists) continue;
      const float factor = shared.out_factor[row];
      const long long at = out_at(p, t, r.token, r.head);
#pragma unroll
      for (int c = 0; c < MmaMainloop::kChannelTiles; ++c) {
        const float x = a.o[m][c][2 * h] * factor, y = a.o[m][c][2 * h + 1] * factor;
        const int channel = first + 8 * c;
        if (common::is_16_bit(ProblemConfig::kOutType) && p.store_vectors) {
          *reinterpret_cast<unsigned*>(p.out + (at + channel) * 2) = common::pack<ProblemConfig::kOutType>(x, y);
        } else {
          common::store_element(ProblemConfig::kOutType, p.out, at + channel * p.out_dim_stride, x);
          common::store_element(ProblemConfig::kOutType, p.out, at + (channel + 1) * p.out_dim_stride, y);
        }
      }
    }
  }
}

// The address of the exponent of a row's scale for the 64 channels from `channel` on, in the stats of an fp16 partial
// output.
__device__ __forceinline__ char* mma_exponent_at(const WorkTileParams& p, int unit, int row, int channel) {
  const int scale = channel / kChannelsOfScale;
  return reinterpret_cast<char*>(partial_stats_at(p.partial_stats, unit, row, scale / kScalesOfHalf) + 3) +
         scale % kScalesOfHalf;
}
// Stores O relative to row_max_ref, in the layout of mla/partial_out.cuh.
__device__ __forceinline__ void mma_store_partial(const WorkTileParams& p, const MmaStorage& shared,
                                                  const MmaMainloop& a) {
  constexpr int kTilesOfScale = kChannelsOfScale / 8;
  static_assert(MmaMainloop::kChannelTiles % kTilesOfScale == 0, "no scale is shared by two warps");
  const int unit = partial_idx(p, shared.work, shared.head_tile), lane = a.lane();
#pragma unroll
  for (int m = 0; m < MmaMainloop::kM; ++m) {
    const int row = a.row_of_out(m, 0);
#pragma unroll
    for (int first = 0; first < MmaMainloop::kChannelTiles; first += kTilesOfScale) {
      const int channel = a.first_channel() + 8 * first;
      float factors[2] = {1, 1};
      if constexpr (kFp16Partials) {
        float bound[2];
        const auto number = [&](int h) {
          return [&a, m, first, h](int i) { return a.o[m][first + i / 2][2 * h + i % 2]; };
        };
#pragma unroll
        for (int h = 0; h < 2; ++h) bound[h] = bound_of(number(h));
        if (__any_sync(0xffffffffu, !are_finite(two_bounds(bound[0], bound[1])))) [[unlikely]] {
#pragma unroll
          for (int h = 0; h < 2; ++h) bound[h] = finite_bound_of(number(h));
        }
        const unsigned bounds = bounds_of_four(two_bounds(bound[0], bound[1]));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const unsigned exponent = bounds >> (7 + 16 * h) & 0xff;
          factors[h] = factor_of(exponent);
          if (lane % 4 == 0) *mma_exponent_at(p, unit, row + 8 * h, channel) = static_cast<char>(exponent - kToInverse);
        }
      }
#pragma unroll
      for (int c = 0; c < kTilesOfScale; ++c) {
        const float(&x)[4] = a.o[m][first + c];
        char* const to = partial_out_at(p.partial_out, unit, row, channel + 8 * c + lane % 4 * 2);
        if constexpr (kFp16Partials) {
          *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack_f16(x[0] * factors[0], x[1] * factors[0]),
                                                     ptx::pack_f16(x[2] * factors[1], x[3] * factors[1]));
        } else {
          *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }
}

}  // namespace attune::mla
