// SPDX-License-Identifier: Apache-2.0
// The epilogue of the m16 kernel: each lane stores its channels of rows g and g + 8.
#pragma once

#include "mla/m16/mainloop.cuh"
#include "mla/partial_out.cuh"

namespace attune::mla {

// The lane's first channel.
__device__ __forceinline__ int m16_channel() {
  return consumer_warp() * M16Config::kChannelsOfWarp + M16Gemms::channel();
}

// Stores O relative to row_max_ref, in the layout of mla/partial_out.cuh.
__device__ __forceinline__ void m16_store_partial(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                                  M16Mainloop& a) {
  const int lane = threadIdx.x % 32, row = lane / 4, unit = partial_idx(p, t, head_tile);
  float factors[2] = {1, 1};
  if constexpr (kFp16Partials) {
    const unsigned bounds = bounds_of_four(a.bounds());
    float* const stats = partial_stats_at(p.partial_stats, unit, row, consumer_warp() / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned exponent = bounds >> (7 + 16 * h) & 0xff;
      char* const inverses = reinterpret_cast<char*>(stats + 8 * kPartialStats * h + 3);
      factors[h] = factor_of(exponent);
      if (lane % 4 == 0) inverses[consumer_warp() % 4] = static_cast<char>(exponent - kToInverse);
    }
  }
#pragma unroll
  for (int b = 0; b < M16Out::kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = a.o.blocks[b][i][j] * factors[j / 2];
      char* const to = partial_out_at(p.partial_out, unit, row, m16_channel() + 16 * b + 2 * i);
      if constexpr (kFp16Partials) {
        *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack_f16(x[0], x[1]), ptx::pack_f16(x[2], x[3]));
      } else {
        *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}
// Stores the row stats of the partial output.
__device__ __forceinline__ void m16_store_partial_stats(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                                        M16Mainloop& a) {
  const int lane = threadIdx.x % 32;
  float* const stats = partial_stats_at(p.partial_stats, partial_idx(p, t, head_tile), lane / 4, consumer_warp() / 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float rescale = a.final_rescale(h);
    if (consumer_warp() % 4 != 0 || lane % 4 != 0) continue;
    float* const to = stats + 8 * kPartialStats * h;
    *reinterpret_cast<float2*>(to) = make_float2(a.row_max[h], a.row_sum[h]);
    to[2] = rescale;
  }
}

// Stores the lane's two rows, normalised.
__device__ __forceinline__ void m16_store_out(const WorkTileParams& p, const WorkTile& t, int head_tile,
                                              M16Mainloop& a) {
  const int lane = threadIdx.x % 32, channel = m16_channel();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h, head = head_tile * p.heads_of_tile + row;
    float factor = a.final_rescale(h);
    if (row >= p.heads_of_tile) continue;
    const auto out = [&](int b, int e) { return a.o.blocks[b][e / 2][2 * h + e % 2] * factor; };
    factor *= common::finish_row(p, t.batch, t.q_begin, t.token_begin, head, a.row_max[h], a.row_sum[h],
                                 consumer_warp() == 0 && lane % 4 == 0);
    const long long at = out_at(p, t, t.token_begin, head);
#pragma unroll
    for (int b = 0; b < M16Out::kBlocks; ++b) {
      if (common::is_16_bit(Config::kOutType) && p.store_vectors) {
        const auto two = [&](int e) { return common::pack<Config::kOutType>(out(b, e), out(b, e + 1)); };
        *reinterpret_cast<uint2*>(p.out + (at + channel + 16 * b) * 2) = make_uint2(two(0), two(2));
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          common::store_element(Config::kOutType, p.out, at + (channel + 16 * b + e) * p.out_dim_stride, out(b, e));
        }
      }
    }
  }
}

}  // namespace attune::mla
