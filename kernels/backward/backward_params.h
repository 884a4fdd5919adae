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
// With a sink and dlse, of which lse is without the sink and P is not: a = 2^(score - lse2), P = a share,
// dS = a (share dP - delta).
struct alignas(16) SinkRowStats {
  float lse2;
  float delta;  // share <dout, out> - dlse
  float share;  // what the sink leaves to the keys
  float unused;
};

// Rows begin .. of a sequence, of q or of k, for one block of threads and any head.
struct BackwardTile {
  int batch, begin;
};
// Followed by its tiles. Those with the most work come first, those of a sequence in the order of their rows, and
// sequences among each other in any order, which changes no result.
struct alignas(16) BackwardList {
  int num_tiles;
  unsigned next;  // how many tiles and heads have been taken (gradients.cu)
};

// new_k and new_v are the dense keys.
struct BackwardParams : WorkTileParams {
  GradientRows dout, dq, dk, dv;
  const float* dlse;  // as lse; null: 0
  long long dlse_batch_stride, dlse_row_stride, dlse_head_stride;
  char* stats;  // RowStats or SinkRowStats [num_heads_q][stats_stride], by sequences: stats_of() (backward/rows.cuh)
  long long stats_stride;
  int stats_vectors;               // out and dout take loads of 16 bytes
  BackwardList *q_list, *kv_list;  // blocks of queries, of keys
  // Sums of dq without the scale, [num_heads_q][dq_tiles] of backward/dq.cuh, and how many blocks of keys have added to
  // each piece, [num_heads_q][dq_tiles][dq_pieces()].
  float* dq_sums;
  unsigned* dq_turns;
  int dq_tiles;
  // [blocks][heads]: whether a block of rows has a NaN or infinity, for recompute.cu.
  int *q_nonfinite, *kv_nonfinite;
  int max_q_tiles, max_kv_tiles;
  int block_keys;    // backward_keys()
  float* sink_sums;  // -dsinks of blocks of queries, [num_heads_q][total_q / 128 + batch]; null: nobody wants it
};

// Of sum_sinks.cu.
struct SinkSumParams : BackwardParams {
  float* dsinks;
  long long dsinks_stride;
};

// Queries of a block of threads, where these have queries (row_stats.cu, store_dq.cu, recompute.cu).
constexpr int kBackwardRows = 128;

ATTUNE_SHARED_FUNCTION int lines_of(int head_dim) { return (head_dim + 63) / 64; }
// Keys of a block: what the registers hold of dk and dv, of accumulators of 32 channels.
ATTUNE_SHARED_FUNCTION int backward_keys(int head_dim_qk, int head_dim_v) {
  const int channels = align_up(head_dim_qk, 32) + align_up(head_dim_v, 32);
  return lines_of(head_dim_qk) <= 3 && channels <= 320 ? 128 : 64;
}
// Queries of a tile, which a block of keys takes at a time: where dk and dv leave few registers, half of the scores.
ATTUNE_SHARED_FUNCTION int backward_tile(int head_dim_qk, int head_dim_v) {
  const bool narrow = head_dim_qk <= 128 && head_dim_v <= 128;
  return !narrow && backward_keys(head_dim_qk, head_dim_v) == 128 ? 32 : 64;
}
// Pieces in which dq of a tile leaves shared memory.
ATTUNE_SHARED_FUNCTION int dq_pieces(int head_dim_qk) { return lines_of(head_dim_qk) == 4 ? 2 : 1; }

// Floats of a tile of dq's sums: lines of 64 channels, whole.
ATTUNE_SHARED_FUNCTION int dq_tile_floats(int head_dim_qk, int head_dim_v) {
  return lines_of(head_dim_qk) * 64 * backward_tile(head_dim_qk, head_dim_v);
}

// Of the gradient kernel (backward/config.cuh). row_stats: the bytes of a row's.
ATTUNE_SHARED_FUNCTION int backward_shared_bytes(int head_dim_qk, int head_dim_v, int q_stages, int dout_stages,
                                                 int row_stats) {
  const int keys = backward_keys(head_dim_qk, head_dim_v), tile = backward_tile(head_dim_qk, head_dim_v),
            lines_qk = lines_of(head_dim_qk), lines_v = lines_of(head_dim_v);
  const bool wide = keys == 64;
  const int inputs = (lines_qk + lines_v) * keys + (lines_qk * q_stages + lines_v * dout_stages) * tile;
  const int scores = (wide ? 3 : 2) * keys * tile * 2;
  const int dq = (wide ? 1 : 2) * dq_tile_floats(head_dim_qk, head_dim_v) * 4 / dq_pieces(head_dim_qk);
  const int stats = q_stages * tile * row_stats;
  const int barriers_and_item = (1 + 2 * q_stages + 2 * dout_stages) * 8 + 8;
  return align_up(inputs * 128 + scores + dq + stats + barriers_and_item, 1024);
}

}  // namespace attune::kernels
