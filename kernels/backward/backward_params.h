// SPDX-License-Identifier: Apache-2.0
// The parameters of the kernels of the backward. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/work_tile_params.h"

namespace attune::kernels {

// dout, or a gradient: strides as NewRows. data null: absent.
struct GradientRows {
  char* data;
  long long batch_stride, row_stride, head_stride, dim_stride;  // in elements
  int dtype;
};

// What a row of q brings to its pairs: P = 2^(score - lse2), dS = P (dP - delta).
struct alignas(8) RowStats {
  float lse2;   // the lse in base 2; infinity: the row sees nothing
  float delta;  // <dout, out> - dlse
};

// Rows begin .. of a sequence, for one block of threads and any head.
struct BackwardTile {
  int batch, begin;
};
// Followed by its tiles: those with the most work first, in any order among equals, which changes no result.
struct alignas(16) BackwardList {
  int num_tiles;
};

// new_k and new_v are the dense keys.
struct BackwardParams : WorkTileParams {
  GradientRows dout, dq, dk, dv;
  const float* dlse;  // as lse; null: 0
  long long dlse_batch_stride, dlse_row_stride, dlse_head_stride;
  RowStats* stats;  // [num_heads_q][stats_stride]; those of a sequence begin at stats_begin() (backward/rows.cuh)
  long long stats_stride;
  int stats_vectors;  // out and dout take loads of 16 bytes
  BackwardList *q_list, *kv_list;  // blocks of queries, of keys
  // [blocks][heads]: whether the gradient kernel left a NaN or infinity in a block, for recompute.cu. Each pass writes
  // those of its own blocks.
  int* nonfinite;
  int max_q_tiles, max_kv_tiles;
};

// Queries, or keys, of a block.
constexpr int kBackwardRows = 128;

ATTUNE_SHARED_FUNCTION int backward_shared_bytes(int head_dim_qk, int head_dim_v, int tile, int stages) {
  const int line_bytes = ((head_dim_qk + 63) / 64 + (head_dim_v + 63) / 64) * 128;
  const int barriers = (1 + 2 * stages) * 8;
  return align_up(line_bytes * (kBackwardRows + stages * tile) +
                      stages * tile * static_cast<int>(sizeof(RowStats)) + barriers,
                  1024);
}

}  // namespace attune::kernels
