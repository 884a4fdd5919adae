// SPDX-License-Identifier: Apache-2.0
// Where the outputs of a part lie in the workspace, between the kernels that attend and the one that merges.
//
// As the accumulators of wgmma and mma have them, so that they are stored as they are, in whole lines: of each 16 rows
// and 256 channels, for every eight channels, the 32 lanes of a warp, each with channels 2 t and 2 t + 1 of row g and
// of row g + 8, g = lane / 4, t = lane % 4.
//
//   [part][head tile][16 rows][half of the channels][eight channels][g][t][row g, row g + 8][two channels]
#pragma once

#include "mla/mla_params.h"

namespace attune::mla {

constexpr int kChannelsOfHalf = kernels::kMlaHeadDimV / 2;
// Of a row: its maximum, a score in base 2; the sum against it; and what outputs are to be multiplied with for that.
constexpr int kPartStats = kernels::kMlaPartStats;

// unit: a part's head tile, counted over all parts. channel: even.
__device__ __forceinline__ long long part_channel(long long unit, int row, int channel) {
  const int g = row % 8, half = channel / kChannelsOfHalf, within = channel % kChannelsOfHalf;
  return unit * (kernels::kMlaRowsOfBlock * kernels::kMlaHeadDimV) +
         (row / 16 * 2 + half) * (16 * kChannelsOfHalf) + within / 8 * 128 + g * 16 + within % 8 * 2 + row / 8 % 2 * 2;
}

}  // namespace attune::mla
