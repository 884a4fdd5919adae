// SPDX-License-Identifier: Apache-2.0
// The parameters of the kernels of the backward. Compiled by NVRTC and by the host's compiler; no standard headers.
#pragma once

#include "common/work_tile_params.h"

namespace attune::kernels {

// dout, or a gradient: strides as NewRows. data null: not given.
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
  unsigned next;  // the next work tile, a tile and head (gradients.cu)
};

// new_k and new_v are the dense keys.
struct BackwardParams : WorkTileParams {
  GradientRows dout, dq, dk, dv;
  const float* dlse;  // as lse; null: 0
  long long dlse_batch_stride, dlse_row_stride, dlse_head_stride;
  char* stats;  // RowStats or SinkRowStats [num_heads_q][stats_stride], by sequences: stats_of() (backward/rows.cuh)
  long long stats_stride;
  int stats_vectors;               // out and dout are of 16 bits and take loads of 16 bytes
  BackwardList *q_list, *kv_list;  // blocks of queries, of keys
  // Where all gradients have one pass: sums of dq without the scale, [num_heads_q][dq_tiles] of backward/dq.cuh, and a
  // semaphore each: how many blocks of keys have added.
  float* dq_sums;
  unsigned* dq_semaphores;
  int dq_tiles;
  // [blocks][heads]: whether a block of rows has a NaN or infinity, for recompute.cu. null: not noted.
  int *q_nonfinite, *kv_nonfinite;
  int max_q_tiles, max_kv_tiles;
  // Sums of blocks of queries, [line][total_q / 128 + batch], for sum_blocks.cu; null: nobody wants them. -dsinks, a
  // line a query head; dt5_bias, a line an entry of it.
  float *sink_sums, *t5_sums;
  int t5_entries;  // of a head
  float* dbias;    // [dbias_heads][bias.rows][bias.columns]
  int dbias_heads;  // 1: all query heads share it
  long long dbias_head_stride, dbias_row_stride, dbias_column_stride;
};

// Of sum_blocks.cu.
struct BlockSumParams : BackwardParams {
  const float* sums;
  float* to;  // [heads][entries]
  long long to_head_stride, to_entry_stride;
  int entries;
  float factor;
};

// Rows of a block of threads, queries or keys.
constexpr int kBackwardRows = 128;

// What a launch of a gradient kernel computes, ATTUNE_GRADIENTS: all of dq, dk and dv, dk and dv, or one.
constexpr int kGradientDq = 1, kGradientDk = 2, kGradientDv = 4, kGradientDkDv = kGradientDk | kGradientDv,
              kGradients = kGradientDq | kGradientDkDv;
constexpr int kGradientDbias = 8, kGradientDt5Bias = 16, kGradientTables = kGradientDbias | kGradientDt5Bias,
              kGradientDsinks = 32;

ATTUNE_SHARED_FUNCTION int lines_of(int head_dim) { return (head_dim + 63) / 64; }
// Whether the registers hold dk and dv of 128 keys together, in accumulators of 32 channels. Else each gradient has a
// pass of its own.
ATTUNE_SHARED_FUNCTION bool has_one_pass(int head_dim_qk, int head_dim_v) {
  return lines_of(head_dim_qk) <= 3 && align_up(head_dim_qk, 32) + align_up(head_dim_v, 32) <= 320;
}
// Rows of a tile of the other side, which a block takes at a time: where dk and dv leave few registers, half as many.
ATTUNE_SHARED_FUNCTION int backward_tile(int head_dim_qk, int head_dim_v) {
  const bool narrow = head_dim_qk <= 128 && head_dim_v <= 128;
  return !narrow && has_one_pass(head_dim_qk, head_dim_v) ? 32 : 64;
}

// Floats of a tile of dq's sums: lines of 64 channels, whole.
ATTUNE_SHARED_FUNCTION int dq_tile_floats(int head_dim_qk, int head_dim_v) {
  return lines_of(head_dim_qk) * 64 * backward_tile(head_dim_qk, head_dim_v);
}

// Of the gradient kernel (backward/config.cuh): stages of x (q, or k in the pass of dq) and of y (dout, or v).
// row_stats: the bytes of a row's.
ATTUNE_SHARED_FUNCTION int backward_shared_bytes(int head_dim_qk, int head_dim_v, int gradients, int x_stages,
                                                 int y_stages, int row_stats) {
  const int tile = backward_tile(head_dim_qk, head_dim_v), lines_qk = lines_of(head_dim_qk),
            lines_v = lines_of(head_dim_v);
  const int own = lines_qk + (gradients == kGradientDv ? 0 : lines_v);
  const int inputs = own * kBackwardRows + (lines_qk * x_stages + lines_v * y_stages) * tile;
  const int sums = 2 * (kBackwardRows * tile * 2 + dq_tile_floats(head_dim_qk, head_dim_v) * 4);
  const int stats = x_stages * tile * row_stats;
  const int barriers_and_tile_idx = (1 + 2 * x_stages + 2 * y_stages) * 8 + 8;
  return align_up(inputs * 128 + (gradients == kGradients ? sums : 16) + stats + barriers_and_tile_idx, 1024);
}

}  // namespace attune::kernels
