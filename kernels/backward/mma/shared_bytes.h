// SPDX-License-Identifier: Apache-2.0
// Sizes on which the host agrees with gradients_mma.cu, dbias.cu and dt5_bias.cu. Compiled by NVRTC and by the host's
// compiler; no standard headers.
#pragma once

#include "backward/backward_params.h"

namespace attune::kernels {

// Bytes of a number in shared memory. Rows are fp32 whatever their type is; but those of dbias.cu and dt5_bias.cu,
// which have no GEMM along the rows, are unchanged.
ATTUNE_SHARED_FUNCTION int mma_number_bytes(int gradients, int element_bytes) {
  return (gradients & kGradientTables) != 0 ? element_bytes : 4;
}
// Rows are lines of 128 bytes.
ATTUNE_SHARED_FUNCTION int mma_lines(int head_dim, int number_bytes = 4) {
  return (head_dim * number_bytes + 127) / 128;
}
// Whether the registers hold dk and dv of 16 rows together.
ATTUNE_SHARED_FUNCTION bool mma_has_dk_beside_dv(int head_dim_qk, int head_dim_v) {
  return mma_lines(head_dim_qk) + mma_lines(head_dim_v) <= 8;
}
// Bytes of a block's work tile in shared memory. A thread reads its fields at each use, because in registers they would
// displace sums.
constexpr int kMmaWorkBytes = 128;
// The most entries of a head of a T5 bias. Each warp of dt5_bias.cu has a sum for each.
constexpr int kMostT5Entries = 4 * kMaxT5Steps + 4;
// dbias.cu: a block has the entries of its rows, which are positions, and of this many tiles of keys.
constexpr int kDbiasTiles = 4;
// The resident rows and a tile of the streamed side, of qk (k, or q) and of vdo (v, or dout), and the stats of
// those rows that are queries.
ATTUNE_SHARED_FUNCTION int mma_backward_shared_bytes(int head_dim_qk, int head_dim_v, int gradients, int rows, int tile,
                                                     int row_stats, int element_bytes) {
  const int bytes = mma_number_bytes(gradients, element_bytes);
  const int qk = mma_lines(head_dim_qk, bytes), vdo = mma_lines(head_dim_v, bytes);
  const bool of_queries = gradients == kGradientDq || (gradients & kGradientTables) != 0;
  return ((qk + (gradients == kGradientDv ? 0 : vdo)) * rows + (qk + vdo) * tile) * 128 +
         (of_queries ? rows : tile) * row_stats + kMmaWorkBytes +
         (gradients == kGradientDt5Bias ? rows / 16 * kMostT5Entries * 4 : 0);
}

}  // namespace attune::kernels
