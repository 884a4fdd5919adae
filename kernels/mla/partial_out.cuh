// SPDX-License-Identifier: Apache-2.0
// The layout of the partial outputs of splits in the workspace, which the attention kernels write and mla/combine.cu
// reads.
//
// It is the layout of wgmma and mma accumulators, so that a warp stores its registers unchanged, in whole lines. A
// block of 16 rows and eight channels has the values of the 32 lanes one after the other: lane 4 g + t has channels 2 t
// and 2 t + 1 of row g and of row g + 8.
//
//   [split][head tile][16 rows][half of the channels][eight channels][g][t][row g, row g + 8][two channels]
//
// If the output is bf16 or 8 bits, partial outputs are fp16: half of the bytes, and still eight times as exact as bf16.
// Each 64 channels of a row (finer than the scales of packed rows) are scaled by a power of two that brings an upper
// bound of their magnitudes near 2^14. The 16 bytes of a lane then have 16 channels:
//
//   [split][head tile][16 rows][half of the channels][16 channels][g][t][eight channels][row g, row g + 8][two
//   channels]
//
// Besides them there are four words for each row and half of the channels: row_max, a score in base 2; row_sum,
// relative to it; the rescale factor of O; and, for fp16, a byte for each 64 channels: the fp32 exponent of the inverse
// scale.
//
//   [split][head tile][rows][half of the channels][four words]
#pragma once

#include "common/element.cuh"
#include "common/finish.cuh"
#include "mla/mla_params.h"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace attune::mla {

constexpr bool kFp16Partials = ATTUNE_OUT_TYPE != common::kFloat32 && ATTUNE_OUT_TYPE != common::kFloat16;
constexpr int kPartialBytes = kFp16Partials ? 2 : 4;  // of an element
constexpr int kChannelsOfHalf = kernels::kMlaHeadDimV / 2;
constexpr int kPartialStats = kernels::kMlaPartialStats;
constexpr int kScalesOfHalf = 4, kChannelsOfScale = kChannelsOfHalf / kScalesOfHalf;

using common::out_at;

// The index of the split's head tile, counted over all splits.
__device__ __forceinline__ int partial_idx(const kernels::WorkTileParams& p, const kernels::WorkTile& t,
                                           int head_tile) {
  return (t.first_split + t.split_idx) * p.num_head_tiles + head_tile;
}

// unit: from partial_idx().
__device__ __forceinline__ float* partial_stats_at(float* stats, int unit, unsigned row, unsigned half) {
  return stats + (kPartialStats * (unit * kernels::kMlaBlockM + row) + kPartialStats / 2 * half);
}
// The address of the element of an even channel.
__device__ __forceinline__ char* partial_out_at(float* partials, int unit, unsigned row, unsigned channel) {
  const unsigned g = row % 8, half = channel / kChannelsOfHalf, within = channel % kChannelsOfHalf, upper = row / 8 % 2;
  const unsigned in_block = kFp16Partials ? within / 16 * 256 + g * 32 + within % 8 * 4 + within / 8 % 2 * 4 + upper * 2
                                          : within / 8 * 128 + g * 16 + within % 8 * 2 + upper * 2;
  return reinterpret_cast<char*>(partials) +
         (static_cast<long long>(unit) * (kernels::kMlaBlockM * kernels::kMlaHeadDimV) +
          (row / 16 * 2 + half) * (16 * kChannelsOfHalf) + in_block) *
             kPartialBytes;
}

// An upper bound of the magnitudes of a thread's 16 elements in 64 channels of a row; at most 16 times the largest. It
// is not finite if an element or their sum is not. number(i): element i.
template <class Number>
__device__ __forceinline__ float bound_of(const Number& number) {
  float sum[2] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i % 2] += fabsf(number(i));
  return sum[0] + sum[1];
}
// |x|, or NaN if x is not finite: fmaxf ignores NaN, so the bound is that of the finite elements.
__device__ __forceinline__ float magnitude(float x) { return fmaf(x, 0.0f, fabsf(x)); }
template <class Number>
__device__ __forceinline__ float finite_bound_of(const Number& number) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) largest = fmaxf(largest, magnitude(number(i)));
  return largest;
}

// Packs two bounds into one word, by their upper halves. Bounds are not negative, so the halves compare as unsigned
// integers.
__device__ __forceinline__ unsigned two_bounds(float first, float second) {
  return ptx::permute_bytes(__float_as_uint(first), __float_as_uint(second), 0x7632);
}
__device__ __forceinline__ bool are_finite(unsigned bounds) {
  return bounds < 0x7f800000u && (bounds & 0xffff) < 0x7f80;
}
constexpr unsigned kLeastExponent = 15;  // biased, of a bound: the scale of a smaller bound would overflow
// The largest bounds of the four threads that share rows. Bits 7 to 14 of each half are the exponent.
__device__ __forceinline__ unsigned bounds_of_four(unsigned bounds) {
  bounds = ptx::max_u16x2(bounds, __shfl_xor_sync(0xffffffffu, bounds, 1));
  bounds = ptx::max_u16x2(bounds, __shfl_xor_sync(0xffffffffu, bounds, 2));
  return ptx::max_u16x2(bounds, kLeastExponent * 0x00800080);
}

// The scale of fp16 elements. exponent: of their bound. The stored exponent, of the inverse scale, is kToInverse less.
__device__ __forceinline__ float factor_of(unsigned exponent) { return __uint_as_float((268 - exponent) << 23); }
constexpr unsigned kToInverse = 14;
// Whether one of four exponents is that of infinity or NaN.
__device__ __forceinline__ bool is_any_infinite(unsigned exponents) {
  return ((exponents & 0x7f7f7f7f) + 0x01010101 & exponents & 0x80808080) != 0;
}

}  // namespace attune::mla
