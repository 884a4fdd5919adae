// SPDX-License-Identifier: Apache-2.0
// Sizes that the host agrees on with gradients_mma.cu, dbias.cu and dt5_bias.cu. Compiled by NVRTC and by the host's
// compiler; no standard headers.
#pragma once

#include "backward/backward_params.h"

namespace attune::kernels {

// Rows are [lines of 32 channels][32], in fp32 whatever their type is.
ATTUNE_SHARED_FUNCTION int mma_lines(int head_dim) { return (head_dim + 31) / 32; }
// Whether the registers hold dk and dv of 16 rows together.
ATTUNE_SHARED_FUNCTION bool mma_has_dk_beside_dv(int head_dim_qk, int head_dim_v) {
  return mma_lines(head_dim_qk) + mma_lines(head_dim_v) <= 8;
}
// What a block has to do, of which a thread reads what it needs where it needs it: held over the loop of tiles it would
// take the registers of sums.
constexpr int kMmaWorkBytes = 128;
// Entries of a head of a T5 bias, at most; of which each warp of dt5_bias.cu has sums.
constexpr int kMostT5Entries = 4 * kMaxT5Steps + 4;
// Of dbias.cu: a block has the entries of its rows, positions, and of so many tiles of keys.
constexpr int kDbiasTiles = 4;
// The own rows and a tile of the other side, of x (k, or q) and of y (v, or dout), and the stats of those that are
// queries.
ATTUNE_SHARED_FUNCTION int mma_backward_shared_bytes(int head_dim_qk, int head_dim_v, int gradients, int rows, int tile,
                                                     int row_stats) {
  const int x = mma_lines(head_dim_qk), y = mma_lines(head_dim_v);
  const bool of_queries = gradients == kGradientDq || (gradients & kGradientTables) != 0;
  return ((x + (gradients == kGradientDv ? 0 : y)) * rows + (x + y) * tile) * 128 +
         (of_queries ? rows : tile) * row_stats + kMmaWorkBytes +
         (gradients == kGradientDt5Bias ? rows / 16 * kMostT5Entries * 4 : 0);
}

}  // namespace attune::kernels
