// SPDX-License-Identifier: Apache-2.0
// Where the outputs of a part lie in the workspace, between the kernels that attend and the one that merges.
//
// As the accumulators of wgmma and mma have them, so that they are stored as they are, in whole lines: of each 16 rows
// and 256 channels, for every eight channels, the 32 lanes of a warp, each with channels 2 t and 2 t + 1 of row g and
// of row g + 8, g = lane / 4, t = lane % 4.
//
//   [part][head tile][16 rows][half of the channels][eight channels][g][t][row g, row g + 8][two channels]
//
// Where the output is rounded to bf16 or 8 bits, parts are fp16: what they take is their bytes, and this is eight times
// as exact. Each 64 channels of a row, as packed rows have no scales for fewer, are multiplied by a power of two that
// brings a bound of their magnitudes near 2^14. A lane's 16 bytes are then of 16 channels:
//
//   [part][head tile][16 rows][half of the channels][16 channels][g][t][eight channels][row g, row g + 8][two channels]
//
// Beside them lie four words for each row and half: its maximum, a score in base 2; the sum against it; what outputs
// are to be multiplied with for that; and, of fp16, a byte for each 64 channels: the exponent, as fp32 has it, of what
// they are to be multiplied with to be what they were.
//
//   [part][head tile][rows][half of the channels][four words]
#pragma once

#include "mla/mla_params.h"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "tile/element.cuh"
#include "tile/finish.cuh"

namespace attune::mla {

constexpr bool kFp16Partials = ATTUNE_OUT_TYPE != tile::kFloat32 && ATTUNE_OUT_TYPE != tile::kFloat16;
constexpr int kPartialBytes = kFp16Partials ? 2 : 4;  // of a number
constexpr int kChannelsOfHalf = kernels::kMlaHeadDimV / 2;
constexpr int kPartialStats = kernels::kMlaPartialStats;
constexpr int kScalesOfHalf = 4, kChannelsOfScale = kChannelsOfHalf / kScalesOfHalf;

__device__ __forceinline__ long long out_at(const kernels::PrefillParams& p, const kernels::WorkTile& t, int token,
                                            int head) {
  return tile::row_offset(p, t.batch, t.q_begin, token, head, p.out_batch_stride, p.out_row_stride, p.out_head_stride);
}

// The head tile of the work tile's part, counted over all parts.
__device__ __forceinline__ int partial_idx(const kernels::PrefillParams& p, const kernels::WorkTile& t, int head_tile) {
  return (t.first_split + t.split_idx) * p.num_head_tiles + head_tile;
}

// unit: a part's head tile, counted over all parts.
__device__ __forceinline__ float* partial_stats_at(float* stats, int unit, unsigned row, unsigned half) {
  return stats + (kPartialStats * (unit * kernels::kMlaBlockM + row) + kPartialStats / 2 * half);
}
// channel: even. Where the number is.
__device__ __forceinline__ char* partial_out_at(float* parts, int unit, unsigned row, unsigned channel) {
  const unsigned g = row % 8, half = channel / kChannelsOfHalf, within = channel % kChannelsOfHalf, upper = row / 8 % 2;
  const unsigned in_block = kFp16Partials ? within / 16 * 256 + g * 32 + within % 8 * 4 + within / 8 % 2 * 4 + upper * 2
                                          : within / 8 * 128 + g * 16 + within % 8 * 2 + upper * 2;
  return reinterpret_cast<char*>(parts) +
         (static_cast<long long>(unit) * (kernels::kMlaBlockM * kernels::kMlaHeadDimV) +
          (row / 16 * 2 + half) * (16 * kChannelsOfHalf) + in_block) *
             kPartialBytes;
}

// A thread has 16 numbers of a row's 64 channels: number(i) is the i-th. At least the largest magnitude of them and at
// most 16 times that, but no finite number where one is none, or where the sum is none.
template <class Number>
__device__ __forceinline__ float bound_of(const Number& number) {
  float sum[2] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i % 2] += fabsf(number(i));
  return sum[0] + sum[1];
}
// For the largest of finite numbers: NaN, which maxima pass over, where one is not finite.
__device__ __forceinline__ float magnitude(float x) { return fmaf(x, 0.0f, fabsf(x)); }
template <class Number>
__device__ __forceinline__ float finite_bound_of(const Number& number) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) largest = fmaxf(largest, magnitude(number(i)));
  return largest;
}

// Bounds are not negative, so their upper halves compare as they do, two at a time.
__device__ __forceinline__ unsigned two_bounds(float first, float second) {
  return ptx::permute_bytes(__float_as_uint(first), __float_as_uint(second), 0x7632);
}
__device__ __forceinline__ bool are_finite(unsigned bounds) {
  return bounds < 0x7f800000u && (bounds & 0xffff) < 0x7f80;
}
constexpr unsigned kLeastExponent = 15;  // of a bound, biased: below there is no factor
// Of four threads that share rows. Bits 7 to 14 of each are the exponent.
__device__ __forceinline__ unsigned bounds_of_four(unsigned bounds) {
  bounds = ptx::max_u16x2(bounds, __shfl_xor_sync(0xffffffffu, bounds, 1));
  bounds = ptx::max_u16x2(bounds, __shfl_xor_sync(0xffffffffu, bounds, 2));
  return ptx::max_u16x2(bounds, kLeastExponent * 0x00800080);
}

// What fp16 numbers are multiplied with; the exponent of its inverse, as it is stored.
__device__ __forceinline__ float factor_of(unsigned exponent) { return __uint_as_float((268 - exponent) << 23); }
constexpr unsigned kToInverse = 14;  // less than the bound's
// Whether one of four exponents is that of what is no finite number.
__device__ __forceinline__ bool is_any_infinite(unsigned exponents) {
  return ((exponents & 0x7f7f7f7f) + 0x01010101 & exponents & 0x80808080) != 0;
}

}  // namespace attune::mla
