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
// as exact. Each half of a row's channels is multiplied by a power of two that brings its largest number near 2^14. A
// lane's 16 bytes are then of 16 channels:
//
//   [part][head tile][16 rows][half of the channels][16 channels][g][t][eight channels][row g, row g + 8][two channels]
#pragma once

#include "mla/mla_params.h"
#include "tile/element.cuh"

namespace attune::mla {

constexpr bool kHalfParts = ATTUNE_OUT_TYPE != tile::kFloat32 && ATTUNE_OUT_TYPE != tile::kFloat16;
constexpr int kPartBytes = kHalfParts ? 2 : 4;  // of a number
constexpr int kChannelsOfHalf = kernels::kMlaHeadDimV / 2;
// Of a row: its maximum, a score in base 2; the sum against it; and for each half of the channels what outputs are to
// be multiplied with for that.
constexpr int kPartStats = kernels::kMlaPartStats;

// unit: a part's head tile, counted over all parts. channel: even. Where the number is.
__device__ __forceinline__ char* part_channel(float* parts, int unit, int row, int channel) {
  const int g = row % 8, half = channel / kChannelsOfHalf, within = channel % kChannelsOfHalf, upper = row / 8 % 2;
  const int in_block = kHalfParts ? within / 16 * 256 + g * 32 + within % 8 * 4 + within / 8 % 2 * 4 + upper * 2
                                  : within / 8 * 128 + g * 16 + within % 8 * 2 + upper * 2;
  return reinterpret_cast<char*>(parts) +
         (static_cast<long long>(unit) * (kernels::kMlaRowsOfBlock * kernels::kMlaHeadDimV) +
          (row / 16 * 2 + half) * (16 * kChannelsOfHalf) + in_block) *
             kPartBytes;
}

// For the largest of finite numbers: NaN, which maxima pass over, where one is not finite.
__device__ __forceinline__ float magnitude(float x) { return fmaf(x, 0.0f, fabsf(x)); }
// What to multiply numbers with whose largest magnitude this is, and its inverse: powers of two.
struct PartScale {
  float factor, inverse;
};
__device__ __forceinline__ PartScale scale_of_part(float largest) {
  const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 15);  // biased; below there is no factor
  return {__uint_as_float(static_cast<unsigned>(268 - exponent) << 23),
          __uint_as_float(static_cast<unsigned>(exponent - 14) << 23)};
}

}  // namespace attune::mla
