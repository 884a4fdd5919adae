// SPDX-License-Identifier: Apache-2.0
// The end of a task: each group stores its half of the channels, normalised to `out`, or as a part of the block's tiles
// to the workspace, from where mla/combine.cu merges all parts.
#pragma once

#include "mla/attend.cuh"
#include "mla/parts.cuh"
#include "tile/finish.cuh"
#include "tile/quad.cuh"

namespace attune::mla {

__device__ __forceinline__ long long out_at(const PrefillParams& p, const Task& t, int token, int head) {
  return tile::row_offset(p, t.batch, t.q_begin, token, head, p.out_batch_stride, p.out_row_stride, p.out_head_stride);
}

// All lanes of the warp, with rows that are not there too. Lanes 0 and 1 of four finish a row each. lowered: what o is to
// be multiplied with, for sum.
__device__ __forceinline__ void store_whole(const PrefillParams& p, const Task& t, const Rows& rows,
                                            const Accumulators& a, const float (&lowered)[2]) {
  constexpr bool kHalves = Config::kOutType == tile::kBFloat16 || Config::kOutType == tile::kFloat16;
  const int lane = threadIdx.x % 32, mine = lane % 2;
  const int token = rows.token(mine), head = rows.head(mine);
  float own_factor = 0;
  long long own_at = -1;
  if (token >= 0) {
    own_at = out_at(p, t, token, head);
    if (lane % 4 < 2)
      own_factor = tile::finish_row(p, t.batch, t.q_begin, token, head, mine != 0 ? a.max[1] : a.max[0],
                                    mine != 0 ? a.sum[1] : a.sum[0], math_group() == 0);
  }
  __syncwarp();
  // Few instructions on the way that is taken: they are fetched for each task anew.
  const int channel = math_group() * Config::kChannels;
  if (kHalves && p.store_vectors) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = __shfl_sync(0xffffffffu, own_factor, (lane & ~3) + h) * lowered[h];
      const long long at = __shfl_sync(0xffffffffu, own_at, (lane & ~3) + h);
      char* const to = p.out + (at + channel + 8 * (lane % 4)) * 2;
#pragma unroll
      for (int i = 0; i < Config::kChannels / 32; ++i) {
        unsigned r[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = a.o[16 * i + 4 * j + 2 * h] * factor, y = a.o[16 * i + 4 * j + 2 * h + 1] * factor;
          r[j] = Config::kOutType == tile::kBFloat16 ? ptx::pack_bf16(x, y) : ptx::pack_f16(x, y);
        }
        tile::transpose_quad(r);
        if (at >= 0) *reinterpret_cast<uint4*>(to + 64 * i) = make_uint4(r[0], r[1], r[2], r[3]);
      }
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = __shfl_sync(0xffffffffu, own_factor, (lane & ~3) + h) * lowered[h];
    const long long at = __shfl_sync(0xffffffffu, own_at, (lane & ~3) + h);
#pragma unroll
    for (int i = 0; i < Config::kChannels / 4; ++i) {
      if (at >= 0)
        tile::store_element(Config::kOutType, p.out,
                            at + (channel + i / 2 * 8 + lane % 4 * 2 + i % 2) * p.out_dim_stride,
                            a.o[i / 2 * 4 + 2 * h + i % 2] * factor);
    }
  }
}

// The head tile of the task's part, counted over all parts.
__device__ __forceinline__ int part_unit(const PrefillParams& p, const Task& t, int head_tile) {
  return (t.first_part + t.part) * p.num_head_tiles + head_tile;
}

// What has been summed up, against the reference. inverse: of what it has been multiplied with.
__device__ __forceinline__ void store_part(const PrefillParams& p, const Task& t, int head_tile, const Accumulators& a,
                                           float (&inverse)[2]) {
  const int thread = static_cast<int>(ptx::kept(threadIdx.x)) % 128, lane = thread % 32;
  char* const to = part_channel(p.partial_out, part_unit(p, t, head_tile), thread / 32 * 16 + lane / 4,
                                math_group() * Config::kChannels + lane % 4 * 2);
  inverse[0] = inverse[1] = 1;
  if constexpr (kHalfParts) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < Config::kChannels / 4; ++i)
        largest = fmaxf(largest, magnitude(a.o[i / 2 * 4 + 2 * h + i % 2]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const PartScale scale = scale_of_part(largest);
      factor[h] = scale.factor, inverse[h] = scale.inverse;
    }
#pragma unroll
    for (int j = 0; j < Config::kChannels / 16; ++j) {
      unsigned r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        r[i] = ptx::pack_f16(a.o[8 * j + 2 * i] * factor[i % 2], a.o[8 * j + 2 * i + 1] * factor[i % 2]);
      *reinterpret_cast<uint4*>(to + 512 * j) = make_uint4(r[0], r[1], r[2], r[3]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < Config::kChannels / 8; ++j) {
      *reinterpret_cast<float4*>(to + 512 * j) =
          make_float4(a.o[4 * j], a.o[4 * j + 1], a.o[4 * j + 2], a.o[4 * j + 3]);
    }
  }
}
// What lies beside them.
__device__ __forceinline__ void store_part_stats(const PrefillParams& p, const Task& t, int head_tile,
                                                 const Accumulators& a, const float (&lowered)[2]) {
  const int thread = static_cast<int>(ptx::kept(threadIdx.x)) % 128;
  if (thread % 4 != 0) return;
  const int row = part_unit(p, t, head_tile) * Config::kRows + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* const stats = p.partial_stats + kPartStats * (row + 8 * h);
    if (math_group() == 0) *reinterpret_cast<float2*>(stats) = make_float2(a.max[h], a.sum[h]);
    stats[2 + math_group()] = lowered[h];
  }
}

}  // namespace attune::mla
