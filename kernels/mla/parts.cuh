// SPDX-License-Identifier: Apache-2.0
// Where parts of a block of rows lie in the workspace: so that a warp stores, and loads to merge them, whole lines.
//
//   partial_out    [part][head tile][4 warps of 16 rows][64 eights of channels][16 rows][8 channels]
//   partial_stats  [part][head tile][4 warps of 16 rows][16 rows][maximum, sum]
//
// Warps of 16 rows none of which is there have neither.
#pragma once

#include "mla/mla_params.h"

namespace attune::mla {

constexpr int kRowsOfBand = kernels::kMlaRowsOfBand, kBands = kernels::kMlaRowsOfBlock / kRowsOfBand;  // of a warp; of a block
constexpr int kEights = kernels::kMlaHeadDimV / 8;                                // of channels

struct Parts {
  float2* stats;
  float* out;
  // part: of all parts of all blocks.
  __device__ __forceinline__ Parts(const kernels::PrefillParams& p, int part, int head_tile, int band) {
    const long long row = ((static_cast<long long>(part) * p.num_head_tiles + head_tile) * kBands + band) * kRowsOfBand;
    stats = reinterpret_cast<float2*>(p.partial_stats) + row;
    out = p.partial_out + row * kernels::kMlaHeadDimV;
  }
  // row: of the band.
  __device__ __forceinline__ float* out_of(int row, int channel) const {
    return out + channel / 8 * (kRowsOfBand * 8) + row * 8 + channel % 8;
  }
};

// Whether any of a band's rows is there.
__device__ __forceinline__ bool has_rows(const kernels::PrefillParams& p, const kernels::Task& t, int band) {
  return band * kRowsOfBand < t.num_tokens * p.heads_of_tile;
}

}  // namespace attune::mla
